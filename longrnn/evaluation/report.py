"""Reports of evaluations: cells as a table and as JSON, and one page with all pictures."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json
from rich.table import Table

from longrnn.console import print_table
from longrnn.evaluation.figures import Line, heat_maps, lines, png
from longrnn.files import file_name, write_atomic
from longrnn.intervals import Estimate
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from longrnn.evaluation.run import Outcome

# A longer text in a cell is broken into lines of this many characters.
MAX_CELL_WIDTH = 26
CELLS, REPORT = "cells.json", "report.html"


class Picture(NamedTuple):
    """One figure: the name of its file, what it shows, and the PNG."""

    name: str
    caption: str
    data: bytes

    def uri(self) -> str:
        """Return the picture as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.data).decode()}"


def table(outcome: Outcome) -> list[list[str]]:
    """Return the titles and rows of a table as texts, with differences below their values.

    Rows have the lengths, ascending, and models in their order; the brief columns come first.
    """
    own = {(one.at, one.model, one.metric): one for one in outcome.cells if one.column.listed}
    columns = dict.fromkeys(cell.column for cell in own.values())
    metrics = [column.name for column in sorted(columns, key=lambda column: not column.brief)]
    places = sorted({at for at, *_ in own}, key=lambda at: -1 if at is None else at)
    counts = {(at, model.name): 0 for at in places for model in outcome.models}
    for cell in own.values():
        n = cell.estimate.n if cell.estimate else 0
        counts[cell.at, cell.model] = max(counts[cell.at, cell.model], n)
    shown = [places != [None], len(outcome.models) > 1, max(counts.values(), default=0) > 1]
    rows = [[*compress([outcome.evaluation.across, "model", "n"], shown), *metrics]]
    for (at, model), n in counts.items():
        first = ["–" if at is None else format_length(at), model, str(n or "–")]
        rows.append(
            [*compress(first, shown), *(str(own.get((at, model, m), "–")) for m in metrics)]
        )
    return rows


def show(outcome: Outcome) -> None:
    """Print the table of an evaluation, and what belongs to it."""
    head, *rows = table(outcome)
    grid = Table(title=outcome.evaluation.title, title_justify="left")
    for name in head:
        is_model = name == "model"
        most = None if is_model else MAX_CELL_WIDTH
        grid.add_column(
            name, justify="left" if is_model else "right", max_width=most, overflow="fold"
        )
    for row, after in zip(rows, [*rows[1:], rows[-1:]], strict=True):
        grid.add_row(*row, end_section="model" in head[1:] and row[0] != after[0])
    print_table(grid)
    for note in outcome.notes():
        print(note)
    if len(outcome.models) > 1:
        name = outcome.models[0].name
        print(f"[95 % intervals]; below a value, its difference from {name}, paired")


def pictures(outcome: Outcome) -> Iterator[Picture]:
    """Draw every column by length, one line per model, and the brief columns as heat maps."""
    title, columns = outcome.evaluation.title, dict.fromkeys(one.column for one in outcome.cells)
    lengths = outcome.evaluation.across == "length"
    across = "length (tokens)" if lengths else outcome.evaluation.across

    def picture(name: str, words: str, figure: Figure) -> Picture:
        file = file_name("_".join(re.findall(r"[^\W_]+", f"{title} {name.removeprefix(title)}")))
        return Picture(file, f"{words}.", png(figure))

    for column in columns:
        points: dict[str, list[tuple[int, Estimate]]] = {}
        for cell in outcome.cells if column.drawn else ():
            if cell.column == column and cell.at is not None and cell.estimate is not None:
                points.setdefault(cell.model, []).append((cell.at, cell.estimate))
        if points:
            drawn = [Line(model, *zip(*own, strict=True)) for model, own in points.items()]
            yield picture(column.name, column.name, lines(drawn, across=across, up=column.name))
    shares: dict[str, dict[tuple[int, str], float]] = {}
    for cell in outcome.cells:
        if cell.column.brief and cell.at is not None and cell.estimate is not None:
            shares.setdefault(cell.model, {})[cell.at, cell.metric] = cell.estimate.mean
    if shares:
        meaning = next(column.name for column in columns if column.drawn)
        figure = heat_maps(shares, across, meaning)
        yield picture("by position", f"{title} by {across} and position", figure)


def write_report(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write the cells, the pictures, and the page of evaluations of the same models.

    Returns:
        The files: `cells.json`, `report.html` and the pictures.
    """
    about = {
        "models": {
            one.name: {
                "fingerprint": one.model.fingerprint(),
                **{name: getattr(one, name) for name in ("checkpoint", "mitigation", "device")},
            }
            for one in outcomes[0].models
        },
        "evaluations": {
            one.title: {"kind": one.kind, **one.model_dump(mode="json", exclude_none=True)}
            for one, *_ in outcomes
        },
    }
    cells = [cell.plain() for outcome in outcomes for cell in outcome.cells]
    record = to_json({**about, "cells": cells}, indent=1, inf_nan_mode="null")
    write_atomic(folder / CELLS, record)
    tables = [(one.evaluation.title, table(one), one.notes()) for one in outcomes]
    drawn = [picture for outcome in outcomes for picture in pictures(outcome)]
    return [folder / CELLS, *write_page("report.html", folder, drawn, {**about, "tables": tables})]


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
