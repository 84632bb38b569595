"""The interface of an evaluation: items, how they are measured, and the columns of its table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import out_of_reach
from longrnn.intervals import Estimate, Quantity
from longrnn.options import Options, Seed
from longrnn.progress import Progress
from longrnn.results import Row


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


Found = list[tuple[Item, Row]]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: its title.
        quantity: how samples become an estimate.
        form: format specification of values.
        drawn: whether it is drawn by length.
        listed: whether it is in the table.
        brief: whether the table has it first, and without intervals and differences.
    """

    name: str
    quantity: Quantity
    form: str = ".2f"
    drawn: bool = True
    listed: bool = True
    brief: bool = False


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


class Cell(NamedTuple):
    """One column of one model at one length.

    Attributes:
        evaluation: title of the evaluation.
        metric: name of the column.
        model: name of the model.
        at: row of the table; None for a column without rows.
        estimate: the result; None if it could not be measured.
        difference: from the first model, on the items that both have; None for the first model.
        reason: why there is no estimate.
        column: the column.
    """

    evaluation: str
    metric: str
    model: str
    at: int | None
    estimate: Estimate | None
    difference: Estimate | None
    reason: str | None
    column: Column

    def __str__(self) -> str:
        if self.estimate is None:
            return self.reason or "–"
        if self.column.brief:
            return format(self.estimate.mean, self.column.form)
        texts = [self.estimate.show(self.column.form)]
        if self.difference is not None:
            texts.append(self.difference.show(self.column.form, "+"))
        return "\n".join(texts)

    def plain(self) -> dict[str, Any]:
        """Return everything but the column, for JSON."""
        values = self._asdict()
        del values["column"]
        for name in ("estimate", "difference"):
            values[name] = values[name] and values[name]._asdict()
        return values


class Evaluation(Options, ABC):
    """One evaluation with the same data for every model; its fields are its options.

    A subclass is one kind. The command line and suites build it from the same options.
    """

    name: str | None = None
    seed: Seed = 0

    kind: ClassVar[str]
    # What the rows of the table are.
    across: ClassVar[str] = "length"
    # Whether the main process measures alone; else items are divided among the processes.
    alone: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """Its name in tables and files."""
        return self.name or self.kind

    @abstractmethod
    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        """Return what to measure of each model, and refuse options that cannot be measured.

        Args:
            models: all models; the others are compared with the first one.

        Raises:
            UserError: the evaluation is not possible with these models.
        """

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        """Return the settings that values of a model depend on, beside the items."""
        return {}

    @abstractmethod
    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        """Measure items, and yield the results of each batch as soon as they are known."""

    @abstractmethod
    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        """Yield what the result of an item adds to the table."""

    def notes(self, found: Mapping[str, Found]) -> list[str]:
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


def batches(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    """Yield items of equal `work`, which can be read together, in batches of at most `size`."""
    for _, same in groupby(sorted(items, key=attrgetter("work")), attrgetter("work")):
        alike = list(same)
        yield from (alike[first : first + size] for first in range(0, len(alike), size))
