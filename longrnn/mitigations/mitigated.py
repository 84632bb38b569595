"""A model with a mitigation is a language model again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.mitigations.base import COLLAPSING, Chain, Mitigation
from longrnn.mixers import Edit, Mixer, Update
from longrnn.models.base import LanguageModel, LMOutput
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.state import LMState, PyTree


class MitigatedState(NamedTuple):
    """`LMState.extra` of a mitigated model.

    Attributes:
        tag: `(b,)` int64, the same for all rows, tells one mitigation's state from another's.
        carry: per layer, per part of the mitigation.
    """

    tag: Tensor
    carry: PyTree


class Mitigated(nn.Module):
    """A `LanguageModel`: a recurrent model under a mitigation.

    Args:
        model: a `RecurrentLM`.
        mitigation: one, or several that apply as `Chain` says.

    Raises:
        UserError: not defined for the model's cells; layers or heads it does not have; numbers
            that were calibrated for another model; members that have no meaning together.
    """

    def __init__(self, model: LanguageModel, mitigation: Mitigation | Sequence[Mitigation]) -> None:
        super().__init__()
        if not isinstance(model, RecurrentLM):
            raise UserError(
                f"a mitigation changes the recurrence of a RecurrentLM, and {type(model).__name__} "
                "is none: give an RNN, GRU, LSTM or Mamba-2 model"
            )
        members = [mitigation] if isinstance(mitigation, Mitigation) else list(mitigation)
        self.mitigation = Chain(members)
        for part in self.mitigation.parts():
            known = part.calibration
            if known is not None and known.fingerprint != model.fingerprint():
                raise UserError(
                    f"{known.source} was calibrated for another model (fingerprint "
                    f"{known.fingerprint}, this model has {model.fingerprint()}): calibrate again"
                )
        self.model = model
        self.parts = tuple(part.bind(model) for part in self.mitigation.parts())
        # What a diagnosis names is not in the description, which has only the file's path.
        named = "".join(
            f"/{[mask.nonzero()[:, 0].tolist() for mask in part.masks]}"
            for part in self.parts
            if part.heads == COLLAPSING
        )
        identity = f"{model.fingerprint()}/{self.mitigation.describe()}{named}"
        self._fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._tag = int(self._fingerprint, 16) >> 1

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
        state = self.model.init_state(batch_size)
        carry = tuple(
            tuple(part.init_carry(layer, batch_size) for part in self.parts)
            for layer in range(len(self.mixers))
        )
        return state._replace(
            extra=MitigatedState(torch.full_like(state.position, self._tag), carry)
        )

    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        observe: Sequence[Edit] | None = None,
    ) -> LMOutput:
        """Consumes tokens; see `LanguageModel`.

        Args:
            tokens: `(b, t)` int64.
            state: of this mitigated model; None stands for `init_state`.
            keep: logits for the last `keep` tokens only; None for all.
            observe: one edit per layer that sees what the mitigation made of the inputs.

        Raises:
            UserError: as the model does, and for a state of the plain model or of another
                mitigation.
        """
        if state is None:
            state = self.init_state(len(tokens))
        extra = self._check_extra(state)
        watchers = [None] * len(self.mixers) if observe is None else observe
        edits = [
            LayerEdit(self.parts, layer, carry, watcher)
            for layer, (carry, watcher) in enumerate(zip(extra.carry, watchers, strict=True))
        ]
        logits, after = self.model(tokens, state._replace(extra=()), keep=keep, edits=edits)
        carry = tuple(tuple(edit.carry) for edit in edits)
        return LMOutput(logits, after._replace(extra=MitigatedState(extra.tag, carry)))

    def _check_extra(self, state: LMState) -> MitigatedState:
        remedy = "start from init_state of this mitigated model"
        if not isinstance(state.extra, MitigatedState):
            raise UserError(f"this is the state of a model without {self.mitigation}: {remedy}")
        if bool((state.extra.tag != self._tag).any()):
            raise UserError(f"this is the state of another model or mitigation: {remedy}")
        return state.extra

    def fingerprint(self) -> str:
        """16 hexadecimal digits: of the model and of the mitigation with all its numbers."""
        return self._fingerprint

    def extra_repr(self) -> str:
        return f"mitigation={self.mitigation}"


class LayerEdit(Edit):
    """The parts of a mitigation in one layer, for the length of one call of the model.

    Args:
        parts: bound mitigations, the one that runs the scan last.
        layer: index of the layer.
        carry: of each part, before the call; after it, the attribute `carry` is what goes on.
        observer: called with what the parts made of the inputs.
    """

    def __init__(
        self,
        parts: Sequence[Mitigation],
        layer: int,
        carry: Sequence[PyTree],
        observer: Edit | None = None,
    ) -> None:
        self.parts, self.layer, self.carry, self.observer = parts, layer, list(carry), observer

    def edit_inputs(self, inputs: ScanInputs) -> ScanInputs:
        for part in self.parts:
            inputs = part.edit_inputs(self.layer, inputs)
        return inputs if self.observer is None else self.observer.edit_inputs(inputs)

    def scan(self, inputs: ScanInputs, state: Tensor, ssd: SSD) -> tuple[Tensor, Tensor]:
        last = len(self.parts) - 1
        if last < 0 or not self.parts[last].runs_the_scan():
            return ssd(inputs, state)
        y, state, self.carry[last] = self.parts[last].scan(
            self.layer, inputs, state, self.carry[last], ssd
        )
        return y, state

    def edit_step(self, before: Tensor, after: Update) -> Update:
        for index, part in enumerate(self.parts):
            after, self.carry[index] = part.edit_step(self.layer, before, after, self.carry[index])
        return after if self.observer is None else self.observer.edit_step(before, after)
