"""Reads the state matrices of Gated DeltaNet layers in Hugging Face models.

Such a layer keeps a matrix S per head, (d_k, d_v), and computes for every token

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T

(arXiv 2412.06464). What is left of an earlier state is the product of the transition matrices of
the tokens since then. Notable choices:
- The recurrence stays that of transformers. While `DeltaWatch` is active, further columns are
  appended to S, with values of zero: they start from the identity, and the same call turns them
  into these products.
- The functions of the recurrence are global names in the module of an architecture; they are
  replaced there while `DeltaWatch` is active, and only calls of the watched layers are changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longrnn.hf.adapter import HFLanguageModel
from longrnn.state import LMState

# The class of the Gated DeltaNet layers, by the `model_type` of a configuration.
FAMILIES: dict[str, str] = {
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


class Transfer(NamedTuple):
    """Products of the transition matrices of one layer, each `(b, h, d_k, d_k)` float32.

    Attributes:
        total: since the first watched token.
        recent: since `DeltaWatch.mark`.
    """

    total: Tensor
    recent: Tensor


def delta_layers(model: PreTrainedModel) -> Mapping[int, Any]:
    """Return the Gated DeltaNet layers of a model by their number in it; empty for others."""
    name = FAMILIES.get(model.config.model_type)
    found: list[Any] = [one for one in model.modules() if type(one).__name__ == name]
    return {layer.layer_idx: layer for layer in found}


def has_delta_layers(model: object) -> bool:
    """Whether `DeltaWatch` can read the states of a model."""
    return isinstance(model, HFLanguageModel) and bool(delta_layers(model.model))


class DeltaWatch:
    """A context in which the transition matrices of Gated DeltaNet layers are multiplied.

    The logits and states of the model stay those without it, to rounding.

    Args:
        model: one with such layers, see `has_delta_layers`.

    Attributes:
        layers: the layers, first layer first.
        numbers: the number of each in the model.
        transfers: by layer; empty before the first token.
    """

    def __init__(self, model: HFLanguageModel) -> None:
        found = delta_layers(model.model)
        self.numbers, self.layers = list(found), list(found.values())
        self.transfers: list[Transfer | None] = [None] * len(self.layers)
        self._running: int | None = None
        self._exits = ExitStack()

    def __enter__(self) -> DeltaWatch:
        module = sys.modules[type(self.layers[0]).__module__]
        for name in RULES:
            rule = getattr(module, name)
            setattr(module, name, self._watched(rule))
            self._exits.callback(setattr, module, name, rule)
        for place, layer in enumerate(self.layers):
            for handle in (
                layer.register_forward_pre_hook(self._entering(place)),
                layer.register_forward_hook(self._entering(None)),
            ):
                self._exits.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def states(self, state: LMState) -> list[Tensor]:
        """Return the state matrix of every head by layer, `(b, h, d_k, d_v)`."""
        return [state.layers[number].recurrent[0] for number in self.numbers]

    def mark(self) -> None:
        """Start the products `Transfer.recent` anew."""
        self.transfers = [
            one if one is None else one._replace(recent=_identity_like(one.recent))
            for one in self.transfers
        ]

    def _entering(self, place: int | None) -> Callable[..., None]:
        def hook(*arguments: object) -> None:
            self._running = place

        return hook

    def _watched(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Return a rule that also turns the products of the running layer into the next ones."""

        def call(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            **options: Any,
        ) -> tuple[Tensor, Tensor | None]:
            place = self._running
            if place is None or not output_final_state:
                given = {"initial_state": initial_state, "output_final_state": output_final_state}
                return rule(query, key, value, **given, **options)
            rows, time, heads, d_v = value.shape
            d_k = key.shape[-1]
            state = initial_state
            if state is None:
                state = value.new_zeros(rows, heads, d_k, d_v, dtype=torch.float32)
            before = self.transfers[place]
            if before is None:
                before = Transfer(*2 * [_identity_like(state.new_empty(rows, heads, d_k, d_k))])
            wide, after = rule(
                query,
                key,
                torch.cat([value, value.new_zeros(rows, time, heads, 2 * d_k)], -1),
                initial_state=torch.cat([state, *(one.to(state) for one in before)], -1),
                output_final_state=True,
                **options,
            )
            after, total, recent = after.split([d_v, d_k, d_k], -1)
            self.transfers[place] = Transfer(total.clone(), recent.clone())
            return wide[..., :d_v].contiguous(), after.contiguous()

        return call


def gate_norm_output(layer: nn.Module) -> nn.Module:
    """Return the projection of a layer whose input is its output behind the gated norm."""
    return layer.get_submodule("o_proj" if hasattr(layer, "o_proj") else "out_proj")


def _identity_like(matrices: Tensor) -> Tensor:
    one = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return one.expand_as(matrices).contiguous()
