"""Tables of results: their columns, their cells, and how a terminal shows them."""

from __future__ import annotations

from itertools import compress
from typing import Any, NamedTuple

from longrnn.console import print_table
from longrnn.intervals import Estimate, Quantity
from longrnn.units import format_length

# A longer text in a cell is broken into lines of this many characters.
MAX_CELL_WIDTH = 26


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


class TableCell(NamedTuple):
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


class ResultTable(NamedTuple):
    """The results of one evaluation.

    Attributes:
        title: of the evaluation.
        across: what the rows are, such as length.
        models: their names; the others are compared with the first.
        cells: model by model.
        notes: sentences under the table.
    """

    title: str
    across: str
    models: list[str]
    cells: list[TableCell]
    notes: list[str]

    def texts(self) -> list[list[str]]:
        """Return the titles and then the rows as texts, with differences below their values.

        Rows have the lengths, ascending, and models in their order; the brief columns come first.
        """
        cells = {(c.at, c.model, c.metric): c for c in self.cells if c.column.listed}
        columns = dict.fromkeys(cell.column for cell in cells.values())
        metrics = [column.name for column in sorted(columns, key=lambda column: not column.brief)]
        places = sorted({at for at, *_ in cells}, key=lambda at: -1 if at is None else at)
        counts = {(at, model): 0 for at in places for model in self.models}
        for cell in cells.values():
            n = cell.estimate.n if cell.estimate else 0
            counts[cell.at, cell.model] = max(counts[cell.at, cell.model], n)
        shown = [places != [None], len(self.models) > 1, max(counts.values(), default=0) > 1]
        rows = [[*compress([self.across, "model", "n"], shown), *metrics]]
        for (at, model), n in counts.items():
            first = ["–" if at is None else format_length(at), model, str(n or "–")]
            values = [str(cells.get((at, model, metric), "–")) for metric in metrics]
            rows.append([*compress(first, shown), *values])
        return rows

    def show(self) -> None:
        """Print the table, and what belongs to it."""
        from rich.table import Table

        titles, *rows = self.texts()
        grid = Table(title=self.title, title_justify="left")
        for name in titles:
            is_model = name == "model"
            most = None if is_model else MAX_CELL_WIDTH
            grid.add_column(
                name, justify="left" if is_model else "right", max_width=most, overflow="fold"
            )
        for row, after in zip(rows, [*rows[1:], rows[-1:]], strict=True):
            grid.add_row(*row, end_section="model" in titles[1:] and row[0] != after[0])
        print_table(grid)
        for note in self.notes:
            print(note)
        if legend := self.legend():
            print(legend)

    def legend(self) -> str:
        """Return what the brackets and the second lines of the cells are, if there are any."""
        shown = [cell for cell in self.cells if cell.column.listed and not cell.column.brief]
        parts = []
        if any(cell.estimate is not None and cell.estimate.has_interval for cell in shown):
            parts.append("[95 % intervals]")
        if any(cell.difference is not None for cell in shown):
            parts.append(f"below a value, its difference from {self.models[0]}, paired")
        return "; ".join(parts)
