"""Tables of results: columns, cells, how a terminal shows them, and the report of all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from longrnn.console import print_table, say
from longrnn.files import file_name, write_atomic
from longrnn.intervals import Estimate, Quantity
from longrnn.reporting.figures import heat_maps, lines, png
from longrnn.reporting.pages import Picture, write_page
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.checkpoints.opened import OpenCheckpoint
    from longrnn.evaluation.base import Evaluation, Results

# A longer text in a cell is broken into lines of this many characters.
MAX_CELL_WIDTH = 26
CELLS_FILE = "cells.json"


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
        evaluation: what was measured.
        results: of all items, by model; the other models are compared with the first.
        cells: model by model.
    """

    evaluation: Evaluation[Any]
    results: Mapping[str, Results]
    cells: list[TableCell]

    @property
    def title(self) -> str:
        """The name of the evaluation."""
        return self.evaluation.title

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return list(self.results)

    @property
    def notes(self) -> list[str]:
        """Sentences under the table."""
        return self.evaluation.notes(self.results)

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
        rows = [[*compress([self.evaluation.across, "model", "n"], shown), *metrics]]
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
        for row, after in zip(rows, [*rows[1:], *rows[-1:]], strict=True):
            grid.add_row(*row, end_section="model" in titles[1:] and row[0] != after[0])
        print_table(grid)
        for line in filter(None, [*self.notes, self.legend()]):
            say(line)

    def legend(self) -> str:
        """Return what the brackets and the second lines of the cells are, if there are any."""
        shown = [cell for cell in self.cells if cell.column.listed and not cell.column.brief]
        parts = []
        if any(cell.estimate is not None and cell.estimate.has_interval for cell in shown):
            parts.append("[95 % intervals]")
        if any(cell.difference is not None for cell in shown):
            parts.append(f"below a value, its difference from {self.models[0]}, paired")
        return "; ".join(parts)


def write_report(
    tables: Sequence[ResultTable],
    models: Sequence[OpenCheckpoint],
    folder: Path,
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write the cells, the pictures, and the page.

    Args:
        tables: one per evaluation, all of the same models.
        models: that were measured.
        folder: created if it does not exist.
        notes: sentences at the top of the page.

    Returns:
        The files: `cells.json`, `report.html` and the pictures.
    """
    about = {
        "models": {
            model.name: {
                "fingerprint": model.model.fingerprint(),
                "checkpoint": model.checkpoint,
                "mitigation": model.mitigation,
                "device": model.device,
                "max_length": model.model.max_length,
                "bos_id": model.tokenizer.bos_id,
            }
            for model in models
        },
        "evaluations": {
            table.title: {
                "kind": table.evaluation.kind,
                **table.evaluation.options.model_dump(mode="json", exclude_none=True),
            }
            for table in tables
        },
    }
    cells = [cell.plain() for table in tables for cell in table.cells]
    write_atomic(
        folder / CELLS_FILE, to_json({**about, "cells": cells}, indent=1, inf_nan_mode="null")
    )
    drawn = [picture for table in tables for picture in pictures(table)]
    of_tables = [(table.title, table.texts(), table.notes) for table in tables]
    values = {**about, "tables": of_tables, "notes": notes}
    return [folder / CELLS_FILE, *write_page("evaluations.html", folder, drawn, values)]


def pictures(table: ResultTable) -> Iterator[Picture]:
    """Draw every column by length, one line per model, and the brief columns as heat maps."""
    across = "length (tokens)" if table.evaluation.across == "length" else table.evaluation.across
    for column in dict.fromkeys(cell.column for cell in table.cells if cell.column.drawn):
        curves: dict[str, dict[int, Estimate]] = {}
        for cell in table.cells:
            if cell.column == column and cell.at is not None and cell.estimate is not None:
                curves.setdefault(cell.model, {})[cell.at] = cell.estimate
        if curves:
            place = across if column.listed else "position (tokens)"
            figure = lines(curves, across=place, up=column.name)
            yield Picture(_file(table, column.name), f"{column.name}.", png(figure))
    shares: dict[str, dict[tuple[int, str], float]] = {}
    for cell in table.cells:
        if cell.column.brief and cell.at is not None and cell.estimate is not None:
            shares.setdefault(cell.model, {})[cell.at, cell.metric] = cell.estimate.mean
    if shares:
        meaning = next(cell.column.name for cell in table.cells if cell.column.drawn)
        figure = heat_maps(shares, across, meaning)
        caption = f"{table.title} by {across} and position."
        yield Picture(_file(table, "by position"), caption, png(figure))


def _file(table: ResultTable, name: str) -> str:
    """Return the name of a picture's file, without its ending."""
    words = re.findall(r"[^\W_]+", f"{table.title} {name.removeprefix(table.title)}")
    return file_name("_".join(words))
