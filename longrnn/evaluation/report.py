"""Reports of evaluations: cells as a table, Markdown and JSON, and one page with all pictures."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table as Grid

from longrnn.console import print_table
from longrnn.evaluation.base import Cell, Evaluation
from longrnn.evaluation.figures import Line, lines, png
from longrnn.files import file_name, write_atomic
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.run import Outcome

# A longer text in a cell is broken into lines of this many characters.
MAX_CELL_WIDTH = 26
# A wider table is printed in several parts.
WIDTH = 100
CELLS, REPORT = "cells.json", "report.html"


class Picture(NamedTuple):
    """One figure: the name of its file, what it shows, and the PNG."""

    name: str
    caption: str
    data: bytes

    def uri(self) -> str:
        """Return the picture as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.data).decode()}"


class Table(NamedTuple):
    """The cells of an evaluation: one row per length and model, one column per metric.

    Attributes:
        title: of the evaluation.
        across: what the rows are, beside the model.
        metrics: titles of the columns.
        rows: length, model, number of samples, and cells.
    """

    title: str
    across: str
    metrics: list[str]
    rows: list[tuple[int | None, str, int, list[Cell | None]]]

    def texts(self, metrics: slice = slice(None)) -> Iterator[list[str]]:
        """Yield the titles and the rows as texts; differences are below their values.

        Args:
            metrics: which of the metrics; by default all.
        """
        several = len({model for _, model, _, _ in self.rows}) > 1
        counted = any(n > 1 for _, _, n, _ in self.rows)
        measured = any(at is not None for at, *_ in self.rows)
        shown = [measured, several, counted]
        rows = [[self.across, "model", "n", *self.metrics[metrics]]]
        for at, model, n, cells in self.rows:
            reasons: list[str | None] = [None]
            texts = ["–" if at is None else format_length(at), model, str(n or "–")]
            for cell in cells[metrics]:
                reasons.append(None if cell is None else cell.reason)
                is_again = reasons[-1] is not None and reasons[-1] == reasons[-2]
                texts.append("likewise" if is_again else _text(cell))
            rows.append(texts)
        for texts in rows:
            yield [*compress(texts, shown), *texts[len(shown) :]]


def _text(cell: Cell | None) -> str:
    return "–" if cell is None else "\n".join(filter(None, (str(cell), cell.below())))


def table(outcome: Outcome) -> Table:
    """Return the table of an evaluation: lengths ascending, models and columns in their order."""
    evaluation, cells = outcome.evaluation, outcome.cells
    own = {(cell.at, cell.model, cell.metric): cell for cell in cells}
    columns = dict.fromkeys(cell.column for cell in cells)
    metrics = [column.name for column in sorted(columns, key=lambda column: not column.brief)]
    rows = []
    for at in sorted({cell.at for cell in cells}, key=lambda at: -1 if at is None else at):
        for model in outcome.models:
            row = [own.get((at, model.name, metric)) for metric in metrics]
            counts = [cell.estimate.n for cell in row if cell is not None and cell.estimate]
            rows.append((at, model.name, max(counts, default=0), row))
    return Table(evaluation.title, evaluation.across, metrics, rows)


def show(outcome: Outcome) -> None:
    """Print the table of an evaluation, in several parts if it is wide, and what belongs to it."""
    found, first = table(outcome), 0
    for stop in range(1, len(found.metrics) + 1):
        if stop == len(found.metrics) or _grid(found, slice(first, stop + 1))[1] > WIDTH:
            print_table(*_grid(found, slice(first, stop)))
            first = stop
    for note in outcome.notes():
        print(note)
    if len(outcome.models) > 1:
        name = outcome.models[0].name
        print(f"[95 % intervals]; below a value, its difference from {name}, paired")


def _grid(found: Table, metrics: slice) -> tuple[Grid, int]:
    """Return some columns of a table for the terminal, and their width in characters."""
    head, *rows = found.texts(metrics)
    grid = Grid(title=found.title, title_justify="left")
    for number, name in enumerate(head):
        is_model = name == "model" and number < 2
        most = None if is_model else MAX_CELL_WIDTH
        grid.add_column(name, justify="left" if is_model else "right", max_width=most)
    for row, (at, *_), after in zip(rows, found.rows, [*found.rows[1:], None], strict=True):
        is_last = after is not None and after[0] != at
        grid.add_row(*row, end_section=is_last and found.rows[0][1] != found.rows[-1][1])
    return grid, Console(width=10_000).measure(grid).maximum


def by_length(evaluation: Evaluation, cells: Sequence[Cell]) -> list[Picture]:
    """Draw every column by length, one line per model."""
    pictures = []
    for column in dict.fromkeys(cell.column for cell in cells if cell.column.drawn):
        own = [cell for cell in cells if cell.column == column and cell.at is not None]
        drawn = []
        for model in dict.fromkeys(cell.model for cell in own):
            points = [(c.at or 0, c.estimate) for c in own if c.model == model and c.estimate]
            if points:
                drawn.append(Line(model, [at for at, _ in points], [e for _, e in points]))
        if not drawn:
            continue
        ticks = sorted({cell.at for cell in own if cell.at is not None})
        caption = f"{column.name}."
        if any(math.isfinite(value.low) for line in drawn for value in line.values):
            caption += " With 95 % intervals."
        missing = list(dict.fromkeys(cell.model for cell in own if cell.estimate is None))
        if missing:
            caption += f" Not at every length: {', '.join(missing)}."
        axis = "length (tokens)" if evaluation.across == "length" else evaluation.across
        figure = lines(drawn, across=axis, up=column.name, ticks=ticks)
        words = column.name.removeprefix(evaluation.title)
        pictures.append(Picture(picture_name(evaluation.title, words), caption, png(figure)))
    return pictures


def picture_name(*words: str) -> str:
    """Return the name of the file of a picture, with underscores between the words."""
    return file_name("_".join(re.findall(r"[^\W_]+", " ".join(words))))


def write_report(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write the cells, the pictures, and the page of evaluations of the same models.

    Returns:
        The files: `cells.json`, `report.html` and the pictures.
    """
    models = outcomes[0].models
    pictures = [
        picture
        for outcome in outcomes
        for picture in outcome.evaluation.pictures(outcome.cells, outcome.found, models)
    ]
    cells = [cell for outcome in outcomes for cell in outcome.cells]
    about = {
        "models": {
            model.name: {
                "checkpoint": model.checkpoint,
                "mitigation": model.mitigation,
                "fingerprint": model.model.fingerprint(),
                "device": model.device,
            }
            for model in models
        },
        "evaluations": {
            outcome.evaluation.title: {
                "kind": outcome.evaluation.kind,
                **outcome.evaluation.model_dump(mode="json", exclude_none=True),
                "notes": outcome.notes(),
            }
            for outcome in outcomes
        },
    }
    record = {**about, "cells": [plain(cell) for cell in cells]}
    write_atomic(folder / CELLS, json.dumps(record, indent=1, allow_nan=False))
    written = write_page(
        "report.html",
        folder,
        pictures,
        {
            **about,
            "tables": [list(table(outcome).texts()) for outcome in outcomes],
            "outcomes": outcomes,
            "failed": sum(cell.estimate is None for cell in cells),
        },
    )
    return [folder / CELLS, *written]


def plain(cell: Cell) -> dict[str, Any]:
    """Return a cell for JSON, with None for what is not a finite number."""
    values = cell._asdict()
    del values["column"]
    for name in ("estimate", "difference"):
        if (one := values[name]) is not None:
            numbers = one._asdict().items()
            values[name] = {key: value if math.isfinite(value) else None for key, value in numbers}
    return values


def write_page(
    template: str, folder: Path, pictures: Sequence[Picture], values: Mapping[str, Any]
) -> list[Path]:
    """Write `report.html` and its pictures.

    Args:
        template: name of a file in `longrnn/evaluation/templates`.
        folder: created if it does not exist.
        pictures: shown in this order, and also written as PNG files.
        values: variables of the template besides `pictures`.

    Returns:
        The files, the report first.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("longrnn.evaluation"), autoescape=True, undefined=StrictUndefined
    )
    html = environment.get_template(template).render({**values, "pictures": pictures})
    for picture in pictures:
        write_atomic(folder / f"{picture.name}.png", picture.data)
    write_atomic(folder / REPORT, html)
    return [folder / REPORT, *(folder / f"{picture.name}.png" for picture in pictures)]
