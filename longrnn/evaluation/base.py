"""The interface of an evaluation: items, how they are measured, and what they add to the table."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.evaluation.options import EVALUATIONS, EvaluationOptions
from longrnn.models.base import out_of_reach
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result


class Item(NamedTuple):
    """One thing to measure.

    Attributes:
        key: identifies it in the store, as JSON.
        spec: whatever `Evaluation.measure` needs.
        group: items with equal groups share work, such as a common beginning; so do, to a lesser
            extent, items with an equal first entry.
        work: its part of the progress, in the steps that `measure` counts.
    """

    key: dict[str, Any]
    spec: Any = None
    group: tuple[Any, ...] = ()
    work: int = 1


# What was measured of some items, and that of one batch after another.
Results = list[tuple[Item, Result]]
Batches = Iterator[Results]


class Sample(NamedTuple):
    """One value of one column.

    Attributes:
        column: the column.
        at: row of the table, usually a length in tokens; None for a column without rows.
        name: of the sample, the same for every model, by which differences are paired.
        value: as the quantity of the column takes it.
    """

    column: Column
    at: int | None
    name: str
    value: Any


# Why cells of a table have no samples, by column and row.
Reasons = dict[tuple[Column, int | None], str]


class Plan(NamedTuple):
    """What an evaluation measures of one model, and why it does not measure the rest."""

    items: list[Item]
    reasons: Reasons


OptionsT = TypeVar("OptionsT", bound=EvaluationOptions)


class Evaluation(ABC, Generic[OptionsT]):
    """One evaluation with the same data for every model. A subclass is one kind.

    Args:
        options: what is measured; suites and the command line build it.
    """

    # What the rows of the table are.
    across: ClassVar[str] = "length"
    # Whether the main process measures alone; else items are divided among the processes.
    alone: ClassVar[bool] = False

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @property
    def kind(self) -> str:
        """The name of its options in `EVALUATIONS`."""
        names = {options: name for name, options in EVALUATIONS.items()}
        return next(names[one] for one in type(self.options).__mro__ if one in names)

    @property
    def title(self) -> str:
        """Its name in tables and files."""
        return self.options.name or self.kind

    @abstractmethod
    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        """Return what to measure of each model, and refuse options that cannot be measured.

        Args:
            models: all models; the others are compared with the first.

        Raises:
            UserError: the evaluation is not possible with these models.
        """

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        """Return the settings that values of a model depend on, beside the items."""
        return {}

    @abstractmethod
    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
        """Measure items, and yield the results of each batch as soon as they are known."""

    @abstractmethod
    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        """Yield what the result of an item adds to the table."""

    def batched(self, items: Sequence[Item], size: int, by: str = "work") -> Iterator[list[Item]]:
        """Yield items that can be read together, of equal `work` or group, `size` at once."""
        for _, same in groupby(sorted(items, key=attrgetter(by)), attrgetter(by)):
            alike = list(same)
            yield from (alike[first : first + size] for first in range(0, len(alike), size))

    def notes(self, results: Mapping[str, Results]) -> list[str]:
        """Return sentences that belong under the table, from the results by model."""
        return []


def within(
    model: OpenCheckpoint, tokens: Mapping[Any, int], column: Column
) -> tuple[list[Any], Reasons]:
    """Return the rows of the table that a model can read, and why it cannot read the others.

    Args:
        model: the model.
        tokens: how many tokens each row needs.
        column: has the reasons.
    """
    reasons = {at: out_of_reach(model.model, count) for at, count in tokens.items()}
    beyond = {(column, at): why for at, why in reasons.items() if why is not None}
    return [at for at, why in reasons.items() if why is None], beyond
