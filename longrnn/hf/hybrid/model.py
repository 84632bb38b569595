"""`HybridLM`: a Hugging Face model whose Mamba-2 layers are computed by our cells.

When a hybrid is loaded, `longrnn.hf.probe` compares its logits in pieces, computed by our cells,
with those of one call without a cache, which transformers computes alone. A layer that differs from
the table of `families` would therefore be found, and the model be run by transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from longrnn.errors import UserError
from longrnn.hf.adapter import HFLanguageModel
from longrnn.hf.hybrid.cache import HybridCarrier, HybridForward, HybridLayer
from longrnn.hf.hybrid.cell import SharedMamba2
from longrnn.hf.hybrid.families import FAMILIES, CannotReplaceError
from longrnn.hf.positions import longest
from longrnn.hf.sizes import quietly
from longrnn.mixers import Edit, EditedState, Mixer, init_carries
from longrnn.models.base import LMOutput, fingerprint
from longrnn.models.checks import check_is_state, check_state, check_targets, check_tokens
from longrnn.models.finite import MAX_LOGITS
from longrnn.state import LMState, PyTree, histories

logger = logging.getLogger(__name__)


class HybridLM(HFLanguageModel):
    """A Hugging Face model with Mamba-2 layers, for evaluation, mitigation and diagnosis.

    The layers are counted without the others: layer 0 of a mitigation or a diagnosis is the first
    Mamba-2 layer, whose number in the model is `layer_numbers[0]`.

    Args:
        model: a causal language model of an architecture in `FAMILIES`.

    Attributes:
        layer_numbers: the number in the model of each Mamba-2 layer.
        mixers: the cell of each Mamba-2 layer, on the weights of the model.

    Raises:
        CannotReplaceError: a layer computes something that our cell does not.
        UserError: see `HFLanguageModel`.
    """

    _carrier: HybridCarrier

    def __init__(self, model: PreTrainedModel) -> None:
        layers = mamba2_layers(model)
        family = FAMILIES[model.config.model_type]
        cells = {index: SharedMamba2(layer, family) for index, layer in layers.items()}
        for index, layer in layers.items():
            layer.forward = HybridForward(layer, index, cells[index])
        super().__init__(model, carrier=HybridCarrier(model))
        self.layer_numbers = list(cells)
        # A list, because the weights are already in `model`.
        self.mixers: list[Mixer] = list(cells.values())

    def with_attention_window(self, window: int) -> Self:
        """Return a model whose attention layers read the last `window` tokens only.

        The current token counts. A position relative to these tokens is below `window`, so that
        there is no `max_length`. The two models share their weights, and not their states.

        Raises:
            UserError: a window below 2, above the length in the configuration, or for a model
                without attention or with an implementation of attention that takes no mask.
        """
        trained = longest(self.config)
        if not histories(self.like):
            raise UserError(f"this {self.kind} has no attention layers: leave attention_window out")
        if not isinstance(window, int) or window < 2 or (trained and window > trained):
            most = f" and at most {trained:,}, the positions of this {self.kind}" if trained else ""
            raise UserError(
                f"attention_window must be at least 2{most}, not {window!r}: give such a number"
            )
        implementation = self.model.config._attn_implementation
        if implementation not in ("eager", "sdpa"):
            raise UserError(
                f"attention_window needs masks, which {implementation} does not take: load the "
                "model with the attention implementation sdpa"
            )
        return self._with(_carrier=HybridCarrier(self.model, window=window), max_length=None)

    @property
    def attention_window(self) -> int | None:
        """How many tokens attention reads; None for all."""
        return self._carrier.window

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the SHA-256 of configuration, weights and window."""
        weights = super().fingerprint()
        if self.attention_window is None:
            return weights
        return fingerprint({"model": weights, "attention_window": self.attention_window}, {})

    @property
    def mixer_kind(self) -> str:
        """The kind of the cells in the registry of mixers."""
        return "mamba2"

    def mixer_states(self, state: LMState) -> list[PyTree]:
        """Return the state of each cell."""
        return [state.layers[number].cell for number in self.layer_numbers]

    def init_state(self, batch_size: int, edits: Sequence[Edit] | None = None) -> LMState:
        """Return the state before the first token; with edits, `extra` holds their carries."""
        state = super().init_state(batch_size)
        if edits is None:
            return state
        return state._replace(extra=init_carries(self.mixers, batch_size, edits))

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        edits: Sequence[Edit] | None = None,
        is_token: Tensor | None = None,
        is_document_start: Tensor | None = None,
    ) -> LMOutput:
        """Process tokens; see `HFLanguageModel.forward`.

        Args:
            tokens: see `LanguageModel`.
            state: see `LanguageModel`.
            keep: see `LanguageModel`.
            edits: one per Mamba-2 layer; `extra` then holds their carries in the given and in the
                returned state.
            is_token: must be None.
            is_document_start: must be None.

        Raises:
            UserError: as `HFLanguageModel.forward`, or a state without the carries of the edits.
        """
        if edits is None:
            return super().forward(
                tokens, state, keep=keep, is_token=is_token, is_document_start=is_document_start
            )
        self._refuse_masks(is_token, is_document_start)
        tokens = check_tokens(tokens, self.vocab_size)
        if state is None:
            state = self.init_state(len(tokens), edits)
        check_is_state(state)
        check_state(state._replace(extra=()), self.like, len(tokens))
        if len(state.extra) != len(edits):
            raise UserError(
                f"{len(edits)} edits need one carry each and the state has {len(state.extra)}: "
                "start from init_state(batch_size, edits)"
            )
        carrier = self._carrier.with_edits(dict(zip(self.layer_numbers, edits, strict=True)))
        logits, after = self._forward(tokens, self._with_carries(state), keep, carrier)
        return LMOutput(logits, self._without_carries(after))

    def token_losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: LMState | None = None,
        *,
        edits: Sequence[Edit] | None = None,
    ) -> tuple[Tensor, LMState]:
        """See `longrnn.models.base.LossModel.token_losses`; `edits` as in `forward`."""
        tokens = check_tokens(tokens, self.vocab_size)
        check_targets(targets, tokens, self.vocab_size)
        after = self.init_state(len(tokens), edits) if state is None else state
        width = max(1, MAX_LOGITS // (len(tokens) * self.vocab_size))
        losses = []
        pairs = zip(tokens.split(width, 1), targets.split(width, 1), strict=True)
        for piece, target in pairs:
            logits, after = self(piece, after, edits=edits)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
            found = cross_entropy(wide, target.clamp(min=0), reduction="none")
            losses.append(found.masked_fill(target < 0, 0))
        return torch.cat(losses, 1), after

    def _with_carries(self, state: LMState) -> LMState:
        """Move the carries from `extra` into the layers, where they are processed by row."""
        layers: list[HybridLayer] = list(state.layers)
        for number, carry in zip(self.layer_numbers, state.extra, strict=True):
            cell = EditedState(layers[number].cell, carry)
            layers[number] = layers[number]._replace(cell=cell)
        return state._replace(layers=tuple(layers), extra=())

    def _without_carries(self, state: LMState) -> LMState:
        """Move the carries from the layers into `extra`."""
        layers: list[HybridLayer] = list(state.layers)
        carries = []
        for number in self.layer_numbers:
            own, carry = layers[number].cell
            layers[number] = layers[number]._replace(cell=own)
            carries.append(carry)
        return state._replace(layers=tuple(layers), extra=tuple(carries))


def mamba2_layers(model: PreTrainedModel) -> Mapping[int, Any]:
    """Return the Mamba-2 layers of a hybrid by their number in the model; empty for others."""
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return {}
    found: list[Any] = [one for one in model.modules() if type(one).__name__ == family.layer]
    return {layer.layer_idx: layer for layer in found}


def open_hugging_face(model: PreTrainedModel) -> HFLanguageModel:
    """Return a `HybridLM` if the model has Mamba-2 layers that our cells can compute.

    Any other model becomes an `HFLanguageModel`; if it has Mamba-2 layers, a warning says why our
    cells cannot compute them.

    Raises:
        UserError: see `HFLanguageModel`.
    """
    if not mamba2_layers(model):
        return HFLanguageModel(model)
    try:
        # transformers would advise to install kernels for layers that longrnn computes.
        with quietly():
            return HybridLM(model)
    except CannotReplaceError as error:
        reason = str(error)
    except UserError as error:
        plain = HFLanguageModel(model)
        logger.warning("%s; it is run by transformers, without mitigations or diagnosis", error)
        return plain
    logger.warning(
        f"a Mamba-2 layer of this {model.config.model_type} cannot be computed by longrnn "
        f"({reason}): it is run by transformers, without mitigations or diagnosis"
    )
    return HFLanguageModel(model)
