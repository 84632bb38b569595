"""The contract of a mitigation: its options, as a frozen value, and the edit that they stand for.

A mitigation knows its options and no model. `bind` turns them into the `Edit` of one layer (see
`longrnn.mixers.edits` for its hooks and their order), which stores nothing that depends on weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Self

from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations.values import Range, frozen, listed
from longrnn.mixers import Edit, Mixer, ScanningMixer, StepwiseMixer
from longrnn.registry import Registry, keyword_options

COLLAPSING = "collapsing"


class Stage(IntEnum):
    """Where in the recurrence a mitigation acts; stages apply in this order, whatever the list."""

    STEPS = 1  # the step dt and the rate A
    MULTIPLIERS = 2  # of the decays and of the inputs
    SCAN = 3  # the recurrence itself; at most one mitigation


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


@dataclass(frozen=True, kw_only=True)
class Mitigation:
    """A change to the recurrence of some layers and heads.

    Members are frozen dataclasses, registered in `MITIGATIONS`; their fields are their options. A
    cell without heads (RNN, GRU, LSTM) counts as one head.

    Args:
        layers: indices of the layers to change; None for all.
        heads: indices of heads in each of these layers; or pairs `[layer, head]`; or
            `"collapsing"`, those that a diagnosis names; None for all.
        diagnosis: the file `diagnosis.yaml` that `"collapsing"` refers to.

    Attributes:
        name: its name in the registry.
        stage: where it acts.
        numbers: the options that are one number, one per layer, or one per layer and head.
        calibration: where its numbers come from, if they were read from a file.

    Raises:
        UserError: options out of range.
    """

    layers: Any = None
    heads: Any = None
    diagnosis: Any = None
    calibration: Calibration | None = field(default=None, init=False, compare=False, repr=False)

    name: ClassVar[str] = "none"
    stage: ClassVar[Stage] = Stage.STEPS
    numbers: ClassVar[Mapping[str, Range]] = {}

    def __post_init__(self) -> None:
        layers, heads = self.layers, self.heads
        if layers is not None and not is_indices(layers):
            raise UserError(f"layers are a list of indices from 0, not {layers!r}")
        if heads not in (None, COLLAPSING) and not is_pairs(heads) and not is_indices(heads):
            raise UserError(
                "heads are a list of indices from 0, a list of pairs [layer, head], or "
                f"{COLLAPSING!r}, not {heads!r}"
            )
        if heads == COLLAPSING and self.diagnosis is None:
            raise UserError(
                "heads='collapsing' needs diagnosis=FILE, the diagnosis.yaml that "
                "`longrnn diagnose states` writes"
            )
        for name, allowed in self.numbers.items():
            self._set(name, allowed.check(name, getattr(self, name)))
        for name in self.options():
            self._set(name, frozen(getattr(self, name)))

    # To be written by members

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        """Why this mitigation is not defined for a kind of cell; None where it is."""
        return None

    def bind(self, layer: int, mixer: Mixer, heads: Tensor) -> Edit:
        """The edit of one layer.

        Args:
            layer: index of the layer.
            mixer: its cell. The edit depends on its kind and its sizes, never on its weights.
            heads: `(h,)` bool, the heads to change.
        """
        return Edit()

    # Common to all

    def parts(self) -> tuple[Mitigation, ...]:
        """This one mitigation; see `Chain.parts`."""
        return (self,)

    def calibrated(self, known: Calibration) -> Self:
        """A copy that names where its numbers come from."""
        one = copy.copy(self)
        one._set("calibration", known)
        return one

    def describe(self) -> str:
        """The options that are given, as a spec; part of what identifies a mitigated state."""
        given = {name: listed(getattr(self, name)) for name in self.options()}
        options = (f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"{self.name}({', '.join(options)})"

    @classmethod
    def options(cls) -> list[str]:
        """Names of the options, the member's own before those of every mitigation."""
        shared = Mitigation.__dataclass_fields__
        names = list(keyword_options(cls))
        return [n for n in names if n not in shared] + [n for n in names if n in shared]

    def __str__(self) -> str:
        return self.describe()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def without_steps(mixer: type[Mixer]) -> str | None:
    """Why what changes step sizes is not defined for a kind of cell; None where it is."""
    if issubclass(mixer, ScanningMixer):
        return None
    if issubclass(mixer, StepwiseMixer) and mixer.gated:
        return "it has gates and no step size dt; use forget_more or state_norm"
    return "it has no step size dt; use state_norm"


class Chain:
    """Several mitigations as one.

    They apply stage by stage, whatever their order in the list: first all that change the step dt
    and the rate A, then the multipliers of decays and inputs, then the one that redefines the
    recurrence. Within a stage they apply in the order of the list. Two that redefine the recurrence
    have no meaning together: the second would scale, or cut off, a state that the first has already
    changed for later tokens.

    Args:
        members: mitigations and chains.

    Raises:
        UserError: two of them redefine the recurrence.
    """

    def __init__(self, members: Sequence[Mitigation | Chain]) -> None:
        flat = [part for member in members for part in member.parts()]
        scans = [part.name for part in flat if part.stage is Stage.SCAN]
        if len(scans) > 1:
            raise UserError(
                f"{' and '.join(scans)} both redefine the recurrence and have no meaning "
                "together: choose one"
            )
        self._parts = tuple(sorted(flat, key=lambda part: part.stage))

    def parts(self) -> tuple[Mitigation, ...]:
        """The mitigations in the order in which they apply."""
        return self._parts

    def describe(self) -> str:
        """The descriptions of the parts, joined by `+`."""
        return "+".join(part.describe() for part in self._parts)

    def __repr__(self) -> str:
        return self.describe()


MITIGATIONS: Registry[Mitigation] = Registry("mitigation")


@MITIGATIONS.register("none")
class NoMitigation(Mitigation):
    """The plain model, for comparisons that run over a list of mitigations."""

    def __init__(self) -> None:
        super().__init__()


def is_indices(value: Any) -> bool:
    """Whether this is a list of indices from 0."""
    return isinstance(value, list | tuple) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def is_pairs(value: Any) -> bool:
    """Whether this is a list of pairs of indices from 0."""
    return isinstance(value, list | tuple) and all(
        is_indices(pair) and len(pair) == 2 for pair in value
    )
