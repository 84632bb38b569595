"""The interface of a mitigation: frozen options, and the edit of the recurrence that they define.

A mitigation is independent of any model. `bind` turns its options into the `Edit` of one layer,
which holds nothing that depends on weights.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.errors import UserError
from longrnn.options import Options
from longrnn.registry import Registry

COLLAPSING = "collapsing"
# Of a layer or a head; the heads of a list of them, or pairs [layer, head].
Index = Annotated[int, Field(ge=0, strict=True)]
Pairs = list[Annotated[list[Index], Field(min_length=2, max_length=2)]]


class Calibration(NamedTuple):
    """Where the numbers of a calibrated mitigation come from.

    Attributes:
        source: the file they were read from.
        fingerprint: fingerprint of the calibrated model.
        length: tokens per calibration prompt.
        text_sha256: hashes of the calibration texts, which must not be evaluation texts.
    """

    source: str
    fingerprint: str
    length: int
    text_sha256: tuple[str, ...]


class Mitigation(Options):
    """A change to the recurrence of some layers and heads.

    Subclasses are registered in `MITIGATIONS`; their fields are their options.
    A cell without heads (RNN, GRU, LSTM) counts as one head.

    Args:
        layers: indices of the layers to change; None for all.
        heads: indices of heads in each of these layers; or pairs `[layer, head]`; or
            `"collapsing"` for those that a diagnosis lists; None for all.
        diagnosis: the path of `diagnosis.yaml`, required for `"collapsing"`.

    Attributes:
        name: name in the registry.
        calibration: where the numbers come from, if they were read from a file.
        files: names of options that are paths, relative to the YAML file that has them.

    Raises:
        UserError: options out of range.
    """

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    layers: list[Index] | None = None
    heads: list[Index] | Pairs | Literal["collapsing"] | None = None
    diagnosis: Annotated[str | None, BeforeValidator(lambda path: path and str(path))] = None
    _calibration: Calibration | None = None

    name: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _require_diagnosis(self) -> Self:
        if self.heads == COLLAPSING and self.diagnosis is None:
            raise UserError(
                "heads='collapsing' needs a diagnosis: give diagnosis=FILE, the diagnosis.yaml "
                "that `longrnn diagnose states` writes"
            )
        return self

    # Implemented by subclasses

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        """Why this mitigation is not defined for a kind of cell; None if it is."""
        return None

    def bind(self, layer: int, heads: Tensor) -> Edit:
        """Builds the edit of one layer.

        Args:
            layer: index of the layer.
            heads: `(h,)` bool, the heads to change, of which there is at least one.
        """
        return Edit()

    # Common to all mitigations

    def calibrated(self, known: Calibration) -> Self:
        """A copy that records where its numbers come from."""
        copied = self.model_copy()
        copied._calibration = known
        return copied

    @property
    def calibration(self) -> Calibration | None:
        return self._calibration

    def __str__(self) -> str:
        """The name and the given options as a spec; part of a mitigated model's fingerprint."""
        given = self.model_dump(exclude_none=True)
        names = [name for name in (*self.own_options(), *Mitigation.model_fields) if name in given]
        return f"{self.name}({', '.join(f'{name}={given[name]!r}' for name in names)})"

    @classmethod
    def own_options(cls) -> list[str]:
        """Names of the options that not every mitigation has."""
        return [name for name in cls.model_fields if name not in Mitigation.model_fields]

    def __hash__(self) -> int:
        return hash(str(self))


def without_steps(cell: type[Cell]) -> str | None:
    """Why a change of step sizes is not defined for a kind of cell; None if it is."""
    if cell.has_steps:
        return None
    if cell.gated:
        return "it has gates and no step size dt; use forget_more or state_norm"
    return "it has no step size dt; use state_norm"


class Chain(NamedTuple):
    """Mitigations combined.

    They apply stage by stage (see `longrnn.cells.edit`), and within a stage in their order. A head
    may have one sliding window or a limit of its norm, and not both.
    """

    parts: tuple[Mitigation, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


class MitigationRegistry(Registry[Mitigation]):
    """The registry of mitigations, each of which gets its name there as an attribute."""

    def __setitem__(self, name: str, member: type[Mitigation]) -> None:
        member.name = name
        super().__setitem__(name, member)


MITIGATIONS = MitigationRegistry("mitigation")


@MITIGATIONS.register("none")
class NoMitigation(Mitigation):
    """No change: the plain model, as a member of lists of mitigations to compare."""
