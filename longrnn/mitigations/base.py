"""The contract of a mitigation: pure hooks, each the identity by default.

A mitigation is built from its options alone, and `bind` fits it to one model: it refuses cells for
which it is not defined, and turns its options into one value per layer and head. What it remembers
from token to token is its carry, a part of the state like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers import Mixer, ScanningMixer, StepwiseMixer, Update
from longrnn.models.recurrent import RecurrentLM
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.registry import Registry
from longrnn.state import PyTree
from longrnn.text import read_mapping

COLLAPSING = "collapsing"


@dataclass(frozen=True)
class Calibration:
    """Where the numbers of a calibrated mitigation come from.

    Attributes:
        source: the file they were read from.
        fingerprint: of the model they belong to.
        length: tokens of a calibration prompt.
        text_sha256: of the calibration texts; evaluating on one of these proves nothing.
    """

    source: str
    fingerprint: str
    length: int
    text_sha256: tuple[str, ...]


class Mitigation:
    """A change to the recurrence of some layers and heads.

    Members are registered in `MITIGATIONS`; their options are keyword-only. A cell without heads
    (RNN, GRU, LSTM) counts as one head.

    Args:
        layers: indices of the layers to change; None for all.
        heads: indices of heads in each of these layers; or pairs `[layer, head]`; or
            `"collapsing"`, those that a diagnosis names; None for all.
        diagnosis: the file `diagnosis.yaml` that `"collapsing"` refers to.

    Raises:
        UserError: options out of range.
    """

    name = "none"
    # A choice among states and no change to the recurrence: works with any cell, not as a hook.
    over_states = False
    calibration: Calibration | None = None

    def __init__(self, *, layers: Any = None, heads: Any = None, diagnosis: Any = None) -> None:
        if layers is not None and not _indices(layers):
            raise UserError(f"layers are a list of indices from 0, not {layers!r}")
        if heads not in (None, COLLAPSING) and not _pairs(heads) and not _indices(heads):
            raise UserError(
                "heads are a list of indices from 0, a list of pairs [layer, head], or "
                f"{COLLAPSING!r}, not {heads!r}"
            )
        if heads == COLLAPSING and diagnosis is None:
            raise UserError(
                "heads='collapsing' needs diagnosis=FILE, the diagnosis.yaml that "
                "`longrnn diagnose states` writes"
            )
        self.layers, self.heads, self.diagnosis = layers, heads, diagnosis
        self.masks: list[Tensor] = []

    # To be written by members

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        """Why this mitigation is not defined for a kind of cell; None where it is."""
        return None

    def prepare(self, layer: int, mixer: Mixer) -> None:
        """Turns options into values of one layer; `self.masks[layer]` names its heads."""

    def init_carry(self, layer: int, batch_size: int) -> PyTree:
        """What this mitigation remembers of one layer before the first token."""
        return ()

    def edit_inputs(self, layer: int, inputs: ScanInputs) -> ScanInputs:
        """Changes the inputs of a scanning cell's recurrence."""
        return inputs

    def scan(
        self, layer: int, inputs: ScanInputs, state: Tensor, carry: PyTree, ssd: SSD
    ) -> tuple[Tensor, Tensor, PyTree]:
        """Runs the recurrence of a scanning cell: y, the state after it, and the carry."""
        y, state = ssd(inputs, state)
        return y, state, carry

    def edit_step(
        self, layer: int, before: Tensor, after: Update, carry: PyTree
    ) -> tuple[Update, PyTree]:
        """Changes what one token does to a stepwise cell's memory `before`."""
        return after, carry

    # Common to all

    def parts(self) -> tuple[Mitigation, ...]:
        """The mitigations that this one is made of."""
        return (self,)

    @classmethod
    def runs_the_scan(cls) -> bool:
        """Whether this is a mitigation that redefines the recurrence itself; there can be one."""
        return cls.scan is not Mitigation.scan

    def describe(self) -> str:
        """The options that matter, for `repr` and for what identifies a mitigated state."""
        options = ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in self.options()
            if getattr(self, name) is not None
        )
        return f"{self.name}({options})"

    @classmethod
    def options(cls) -> list[str]:
        """Names of the constructor's options, each also an attribute."""
        from longrnn.registry import keyword_options

        return list(keyword_options(cls))

    def __repr__(self) -> str:
        return self.describe()

    def bind(self, model: RecurrentLM) -> Self:
        """A copy fitted to a model.

        Raises:
            UserError: not defined for its cells, or layers or heads that it does not have.
        """
        bound = copy.copy(self)
        kind = type(model.mixers[0])
        reason = self.undefined(kind)
        if reason is not None:
            raise UserError(
                f"{self.name} is not defined for {model.config.mixer['kind']}: {reason}"
            )
        bound.masks = self._select(model)
        for layer, mixer in enumerate(model.mixers):
            bound.prepare(layer, mixer)
        return bound

    def _select(self, model: RecurrentLM) -> list[Tensor]:
        """Per layer, which heads are changed: `(h,)` bool."""
        counts = [mixer.n_heads for mixer in model.mixers]
        heads: Any = self._collapsing(model) if self.heads == COLLAPSING else self.heads
        every = range(len(counts))
        layers = every if self.layers is None else self.layers
        pairs: list[tuple[int, int | None]]
        if heads is None:
            pairs = [(layer, None) for layer in layers]
        elif _indices(heads):
            pairs = [(layer, head) for layer in layers for head in heads]
        else:
            pairs = [(layer, head) for layer, head in heads]
        for layer in (*layers, *(layer for layer, _ in pairs)):
            if layer not in every:
                raise UserError(f"the model has no layer {layer}: it has 0 to {len(counts) - 1}")
        masks = [torch.zeros(count, dtype=torch.bool) for count in counts]
        for layer, head in pairs:
            if head is not None and head >= counts[layer]:
                raise UserError(
                    f"layer {layer} has no head {head}: it has 0 to {counts[layer] - 1}"
                )
            if layer in layers:
                masks[layer][slice(None) if head is None else head] = True
        return masks

    def _collapsing(self, model: RecurrentLM) -> list[list[int]]:
        """The heads that the diagnosis names."""
        path = Path(str(self.diagnosis))
        remedy = "make one with `longrnn diagnose states CHECKPOINT`"
        found = read_mapping(path, remedy, kind="diagnosis")
        if not _pairs(found.get(COLLAPSING)):
            raise UserError(f"{path} is no diagnosis: give the diagnosis.yaml of diagnose states")
        if found.get("fingerprint") not in (None, model.fingerprint()):
            raise UserError(f"{path} is the diagnosis of another model: make one of this model")
        if not found[COLLAPSING]:
            raise UserError(
                f"{path} names no collapsing head: leave the mitigation out, or name its heads"
            )
        return found[COLLAPSING]


def without_steps(mixer: type[Mixer]) -> str | None:
    """Why what changes step sizes is not defined for a kind of cell; None where it is."""
    if issubclass(mixer, ScanningMixer):
        return None
    if issubclass(mixer, StepwiseMixer) and mixer.gated:
        return "it has gates and no step size dt; use forget_more or state_norm"
    return "it has no step size dt; use state_norm"


class Chain(Mitigation):
    """Several mitigations, applied in order.

    Every edit of the inputs (or of a stepwise cell's update) applies to the result of the one
    before it; the one that redefines the recurrence, if there is one, then runs on what they
    made, wherever it stands in the list. Two that redefine it have no meaning together: the second
    would scale, or cut off, a state that the first has already changed for later tokens.

    Args:
        members: the mitigations.

    Raises:
        UserError: two of them redefine the recurrence.
    """

    name = "chain"

    def __init__(self, members: Sequence[Mitigation]) -> None:
        super().__init__()
        flat = [part for member in members for part in member.parts()]
        scans = [part.name for part in flat if part.runs_the_scan()]
        if len(scans) > 1:
            raise UserError(
                f"{' and '.join(scans)} both redefine the recurrence and have no meaning "
                "together: choose one"
            )
        self.members = tuple(sorted(flat, key=lambda part: part.runs_the_scan()))

    def parts(self) -> tuple[Mitigation, ...]:
        return self.members

    def describe(self) -> str:
        return "+".join(part.describe() for part in self.members)


MITIGATIONS: Registry[Mitigation] = Registry("mitigation")


@MITIGATIONS.register("none")
class NoMitigation(Mitigation):
    """The plain model, for comparisons that run over a list of mitigations."""

    def __init__(self) -> None:
        super().__init__()


def _indices(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(_indices(pair) and len(pair) == 2 for pair in value)
