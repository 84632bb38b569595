"""A model with a mitigation is a language model again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.mitigations.base import COLLAPSING, Chain, Mitigation
from longrnn.mitigations.selection import select
from longrnn.mitigations.values import check_sizes
from longrnn.mitigations.weights import Remembered
from longrnn.mixers import Composed, Mixer
from longrnn.models.base import LanguageModel, LMOutput
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.state import LMState, PyTree, leaves


class MitigatedState(NamedTuple):
    """`LMState.extra` of a mitigated model.

    Attributes:
        tag: `(b,)` int64, the same for all rows: which weights and which mitigation made the state.
        carry: per layer, per part of the mitigation.
    """

    tag: Tensor
    carry: PyTree


class Mitigated(nn.Module):
    """A `LanguageModel`: a recurrent model under a mitigation.

    Nothing that depends on a weight is computed here: a model whose weights are changed, in place
    or by `torch.func.functional_call`, is the model that a new `Mitigated` of these weights is. A
    state belongs to the weights and the mitigation that made it, and is refused by others; see
    `adopt`. After a change of weights the next call computes their SHA-256 once.

    Args:
        model: a `RecurrentLM`.
        mitigation: one, or several that apply as `Chain` says.

    Attributes:
        edits: per layer, what the mitigation makes of the recurrence.
        parts: the mitigations in the order in which they apply.
        heads: per part and layer, the heads that are changed, `(h,)` bool.

    Raises:
        UserError: not defined for the model's cells; layers or heads it does not have; numbers
            that were calibrated for another model; members that have no meaning together.
    """

    def __init__(
        self,
        model: LanguageModel,
        mitigation: Mitigation | Chain | Sequence[Mitigation | Chain],
    ) -> None:
        super().__init__()
        if not isinstance(model, RecurrentLM):
            raise UserError(
                f"a mitigation changes the recurrence of a RecurrentLM, and {type(model).__name__} "
                "is none: give an RNN, GRU, LSTM or Mamba-2 model"
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
        self._last_tag = Remembered()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.model.vocab_size

    @property
    def max_length(self) -> int | None:
        """That of the model inside."""
        return self.model.max_length

    @property
    def config(self) -> RecurrentConfig:
        """Of the model inside."""
        return self.model.config

    @property
    def mixers(self) -> list[Mixer]:
        """The cells of the model inside, first layer first."""
        return self.model.mixers

    def init_state(self, batch_size: int) -> LMState:
        """The zero state, with empty carries."""
        state = self.model.init_state(batch_size, self.edits)
        return self._tagged(state)

    def forward(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        """Consumes tokens; see `LanguageModel`.

        Args:
            tokens: `(b, t)` int64.
            state: of this mitigated model; None stands for `init_state`.
            keep: logits for the last `keep` tokens only; None for all.

        Raises:
            UserError: as the model does, and for a state of the plain model, of other weights or
                of another mitigation.
        """
        if state is None:
            state = self.init_state(len(tokens))
        extra = self._check_extra(state)
        given = state._replace(extra=extra.carry)
        logits, after = self.model(tokens, given, keep=keep, edits=self.edits)
        return LMOutput(logits, after._replace(extra=MitigatedState(extra.tag, after.extra)))

    def adopt(self, state: LMState) -> LMState:
        """A state of earlier weights of this model, to go on from with the present ones.

        Truncated backpropagation through time carries a state over an optimizer's step on purpose.

        Raises:
            UserError: a state that does not fit: of a plain model, or with another carry.
        """
        extra = self._extra(state)
        given, own = (
            [(name, leaf.shape[1:]) for name, leaf in leaves(carry)]
            for carry in (extra.carry, self.model.init_carries(1, self.edits))
        )
        if given != own:
            raise UserError(
                f"this state has not the carry of {self.mitigation}: "
                "start from init_state of this mitigated model"
            )
        return self._tagged(state._replace(extra=extra.carry))

    def _tagged(self, state: LMState) -> LMState:
        """A state whose `extra` is a carry, with the tag beside it."""
        tag = torch.full_like(state.position, self._tag())
        return state._replace(extra=MitigatedState(tag, state.extra))

    def _extra(self, state: LMState) -> MitigatedState:
        if not isinstance(state.extra, MitigatedState):
            raise UserError(
                f"this is the state of a model without {self.mitigation}: "
                "start from init_state of this mitigated model"
            )
        return state.extra

    def _check_extra(self, state: LMState) -> MitigatedState:
        extra = self._extra(state)
        if bool((extra.tag != self._tag()).any()):
            raise UserError(
                "this is the state of another model or mitigation, or of weights that were changed "
                "since: start from init_state of this mitigated model, or call its adopt(state) "
                "to go on with the present weights"
            )
        return extra

    def _tag(self) -> int:
        """The fingerprint of the present weights and the mitigation, as 63 bits."""
        weights = chain(self.model.parameters(), self.model.buffers())
        return self._last_tag.get(weights, lambda: int(self.fingerprint(), 16) >> 1)

    def fingerprint(self) -> str:
        """16 hexadecimal digits: of the model's weights and of the mitigation with all its numbers.

        Reads every weight.
        """
        # What a diagnosis names is not in the description, which has only the file's path.
        named = "".join(
            f"/{[mask.nonzero()[:, 0].tolist() for mask in heads]}"
            for part, heads in zip(self.parts, self.heads, strict=True)
            if part.heads == COLLAPSING
        )
        identity = f"{self.model.fingerprint()}/{self.mitigation.describe()}{named}"
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def extra_repr(self) -> str:
        return f"mitigation={self.mitigation}"


def _check(part: Mitigation, model: RecurrentLM) -> None:
    """Refuses a mitigation that is not defined for a model, or that was made for another one."""
    known = part.calibration
    if known is not None and known.fingerprint != model.fingerprint():
        raise UserError(
            f"{known.source} was calibrated for another model (fingerprint "
            f"{known.fingerprint}, this model has {model.fingerprint()}): calibrate again"
        )
    check_defined(part, model)
    for option in part.numbers:
        check_sizes(option, getattr(part, option), [mixer.n_heads for mixer in model.mixers])


def check_defined(part: type[Mitigation] | Mitigation, model: RecurrentLM) -> None:
    """Raises a `UserError` where a mitigation is not defined for the cells of a model."""
    reason = part.undefined(type(model.mixers[0]))
    if reason is not None:
        kind = model.config.mixer["kind"]
        raise UserError(f"{part.name} is not defined for {kind}: {reason}")
