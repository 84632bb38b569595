"""`Mitigated`: a language model whose recurrent layers have a mitigation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.mitigations.base import COLLAPSING, Chain, Mitigation
from longrnn.mitigations.selection import select
from longrnn.mitigations.values import check_sizes
from longrnn.mitigations.weights import CachedValue
from longrnn.mixers import Composed, Mixer, fewest, init_carries
from longrnn.models.base import (
    CapturableModel,
    EditableModel,
    LanguageModel,
    LMOutput,
)
from longrnn.models.checks import check_is_state, check_tokens
from longrnn.models.context import ContextGroup, check_divisible
from longrnn.models.vectors import Vectors
from longrnn.state import LMState, PyTree, leaves


class MitigatedState(NamedTuple):
    """`LMState.extra` of a mitigated model.

    Attributes:
        tag: `(b,)` int64, the same for all rows: identifies the weights and the mitigation.
        carry: the carries of the edits, per layer and part of the mitigation.
    """

    tag: Tensor
    carry: PyTree


class Mitigated(nn.Module):
    """A `LanguageModel`: a recurrent model with a mitigation.

    It stores nothing that depends on weights, so weights may be changed in place or replaced by
    `torch.func.functional_call`. A state is valid for the weights and the mitigation that computed
    it, and refused by others; see `adopt`. After a change of weights, the next call computes their
    SHA-256 once.

    Args:
        model: a `RecurrentLM`, or a hybrid with Mamba-2 layers.
        mitigation: one or several, which are combined as in `Chain`.

    Attributes:
        edits: the edit of each layer.
        parts: the mitigations in the order in which they apply.
        heads: per part and layer, the heads that are changed, `(h,)` bool.

    Raises:
        UserError: a mitigation that is not defined for the model's cells, layers or heads that do
            not exist, numbers calibrated for another model, or members that exclude each other.
    """

    def __init__(
        self,
        model: LanguageModel,
        mitigation: Mitigation | Chain | Sequence[Mitigation | Chain],
    ) -> None:
        super().__init__()
        if not isinstance(model, EditableModel):
            raise UserError(
                "a mitigation changes a recurrence that longrnn computes, and that of a "
                f"{type(model).__name__} it does not: give an RNN, GRU, LSTM or Mamba-2 model, or "
                "a hybrid with Mamba-2 layers"
            )
        members = [mitigation] if isinstance(mitigation, Mitigation | Chain) else mitigation
        self.mitigation = Chain(members)
        self.parts = self.mitigation.parts()
        for part in self.parts:
            _check(part, model)
        self.model = model
        self.heads = [select(part, model) for part in self.parts]
        self.edits = [
            Composed(
                [
                    part.bind(layer, mixer, heads[layer])
                    for part, heads in zip(self.parts, self.heads, strict=True)
                ]
            )
            for layer, mixer in enumerate(model.mixers)
        ]
        self._last_tag: CachedValue[int] = CachedValue()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.model.vocab_size

    @property
    def max_length(self) -> int | None:
        """How many tokens a sequence may have; None for any number."""
        return self.model.max_length

    @property
    def is_capturable(self) -> bool:
        """See `CapturableModel`."""
        capturable = isinstance(self.model, CapturableModel) and self.model.is_capturable
        return capturable and not any(edit.reads_device for edit in self.edits)

    def static_state(self, state: LMState) -> LMState:
        """See `CapturableModel`."""
        inner, extra = self._parts(state)
        pairs = zip(self.edits, extra.carry, strict=True)
        carry = tuple(edit.static_carry(own) for edit, own in pairs)
        found = inner.static_state(state._replace(extra=()))
        return found._replace(extra=MitigatedState(extra.tag.clone(), carry))

    def state_after(self, state: LMState, static: LMState) -> LMState:
        """See `CapturableModel`."""
        inner, extra = self._parts(state)
        triples = zip(self.edits, extra.carry, static.extra.carry, strict=True)
        carry = tuple(edit.carry_after_static(own, new) for edit, own, new in triples)
        found = inner.state_after(state._replace(extra=()), static._replace(extra=()))
        return found._replace(extra=MitigatedState(extra.tag, carry))

    def static_tokens(self, state: LMState) -> Tensor | None:
        """See `CapturableModel`."""
        inner, extra = self._parts(state)
        pairs = zip(self.edits, extra.carry, strict=True)
        counts = (edit.static_tokens(own) for edit, own in pairs)
        return fewest([inner.static_tokens(state), *counts])

    def _parts(self, state: LMState) -> tuple[CapturableModel, MitigatedState]:
        """The model without mitigation, which must be capturable, and `state.extra`."""
        assert isinstance(self.model, CapturableModel)
        return self.model, self._extra(state)

    @property
    def config(self) -> Any:
        """The configuration of the unmitigated model."""
        return self.model.config  # type: ignore[attr-defined]

    @property
    def mixers(self) -> list[Mixer]:
        """The cells, first layer first."""
        return self.model.mixers

    def init_state(self, batch_size: int) -> LMState:
        """The zero state of `batch_size` rows, with initial carries."""
        state = self.model.init_state(batch_size, self.edits)
        return self._tagged(state)

    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        is_token: Tensor | None = None,
        is_document_start: Tensor | None = None,
        context: ContextGroup | None = None,
        checked: bool = False,
        vectors: Vectors | None = None,
    ) -> LMOutput:
        """Consumes tokens; see `LanguageModel`.

        Args:
            tokens: `(b, t)` int64.
            state: of this mitigated model; None for `init_state`.
            keep: return logits for the last `keep` tokens only; None for all.
            is_token: `(b, t)` bool, false at padding; see `RecurrentLM.forward`.
            is_document_start: `(b, t)` bool; the carries of the mitigation restart too.
            context: the processes that hold the rows together; see `RecurrentLM.forward`.
            checked: see `RecurrentLM.forward`; a `CapturableModel` takes it.
            vectors: see `RecurrentLM.forward`; a `RecurrentLM` takes it.

        Raises:
            UserError: invalid tokens or masks, or a state of the plain model, of other weights or
                of another mitigation.
        """
        if not checked:
            tokens = check_tokens(tokens, self.vocab_size, is_token)
        if state is None:
            state = self.init_state(len(tokens))
        extra = self._extra(state) if checked else self._check_extra(state)
        given = state._replace(extra=extra.carry)
        options: dict[str, Any] = {}
        if checked and isinstance(self.model, CapturableModel):
            options["checked"] = True
        if context is not None:
            check_divisible(self.model)
            options["context"] = context
        if vectors is not None:
            options["vectors"] = vectors
        logits, after = self.model(
            tokens,
            given,
            keep=keep,
            edits=self.edits,
            is_token=is_token,
            is_document_start=is_document_start,
            **options,
        )
        return LMOutput(logits, after._replace(extra=MitigatedState(extra.tag, after.extra)))

    def token_losses(
        self, tokens: Tensor, targets: Tensor, state: LMState | None = None
    ) -> tuple[Tensor, LMState]:
        """See `LossModel.token_losses`."""
        tokens = check_tokens(tokens, self.vocab_size)
        state = self.init_state(len(tokens)) if state is None else state
        extra = self._check_extra(state)
        given = state._replace(extra=extra.carry)
        losses, after = self.model.token_losses(tokens, targets, given, edits=self.edits)
        return losses, after._replace(extra=MitigatedState(extra.tag, after.extra))

    def adopt(self, state: LMState) -> LMState:
        """Makes a state computed with earlier weights valid for the current weights.

        A training loop of your own that carries a state over an optimizer step calls this after the
        step. `longrnn train` does not: it calls the plain model with the edits of the mitigation.

        Raises:
            UserError: the state of a plain model, or a state with another carry.
        """
        extra = self._extra(state)
        given, own = (
            [(name, leaf.shape[1:]) for name, leaf in leaves(carry)]
            for carry in (extra.carry, init_carries(self.mixers, 1, self.edits))
        )
        if given != own:
            raise UserError(
                f"this state does not have the carry of {self.mitigation}: "
                "start from init_state of this mitigated model"
            )
        return self._tagged(state._replace(extra=extra.carry))

    def _tagged(self, state: LMState) -> LMState:
        """Adds the tag to a state whose `extra` is a carry."""
        tag = torch.full_like(state.position, self._tag())
        return state._replace(extra=MitigatedState(tag, state.extra))

    def _extra(self, state: LMState) -> MitigatedState:
        """`state.extra`, which must be that of a mitigated model."""
        check_is_state(state)
        if not isinstance(state.extra, MitigatedState):
            raise UserError(
                f"this is the state of a model without {self.mitigation}: "
                "start from init_state of this mitigated model"
            )
        return state.extra

    def _check_extra(self, state: LMState) -> MitigatedState:
        """`state.extra`, which must be of these weights and this mitigation."""
        extra = self._extra(state)
        if bool((extra.tag != self._tag()).any()):
            raise UserError(
                "this is the state of another model or mitigation, or of weights that were changed "
                "since: start from init_state of this mitigated model, or call its adopt(state) "
                "to continue with the current weights"
            )
        return extra

    def _tag(self) -> int:
        """The fingerprint of the current weights and the mitigation, as 63 bits."""
        weights = chain(self.model.parameters(), self.model.buffers())
        return self._last_tag.get(weights, lambda: int(self.fingerprint(), 16) >> 1)

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the SHA-256 of all weights and of the mitigation's numbers."""
        # The description has only the path of a diagnosis: add the heads that it lists.
        named = "".join(
            f"/{[mask.nonzero()[:, 0].tolist() for mask in heads]}"
            for part, heads in zip(self.parts, self.heads, strict=True)
            if part.heads == COLLAPSING
        )
        identity = f"{self.model.fingerprint()}/{self.mitigation.describe()}{named}"
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def spec(self) -> str:
        """The mitigation as text without reference to files, so that it fits other weights too."""
        return Chain(
            [
                replace(
                    part,
                    diagnosis=None,
                    heads=[
                        [layer, head]
                        for layer, mask in enumerate(heads)
                        for head in mask.nonzero()[:, 0].tolist()
                    ],
                )
                if part.heads == COLLAPSING
                else part
                for part, heads in zip(self.parts, self.heads, strict=True)
            ]
        ).describe()

    def extra_repr(self) -> str:
        return f"mitigation={self.mitigation}"


def _check(part: Mitigation, model: EditableModel) -> None:
    """Refuses a mitigation that is not defined for a model or was calibrated for another one."""
    known = part.calibration
    if known is not None and known.fingerprint != model.fingerprint():
        raise UserError(
            f"{known.source} was calibrated for another model (fingerprint "
            f"{known.fingerprint}, this model has {model.fingerprint()}): calibrate again"
        )
    check_defined(part, model)
    for option in part.numbers:
        check_sizes(option, getattr(part, option), [mixer.n_heads for mixer in model.mixers])


def check_defined(part: type[Mitigation] | Mitigation, model: EditableModel) -> None:
    """Raises a `UserError` if a mitigation is not defined for the cells of a model."""
    reason = part.undefined(type(model.mixers[0]))
    if reason is not None:
        raise UserError(f"{part.name} is not defined for {model.mixer_kind}: {reason}")
