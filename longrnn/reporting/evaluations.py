"""The report of evaluations of the same models: cells as JSON, and one page with all pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from longrnn.files import file_name, write_atomic
from longrnn.intervals import Estimate
from longrnn.reporting.figures import Line, heat_maps, lines, png
from longrnn.reporting.pages import Picture, write_page
from longrnn.reporting.tables import ResultTable

CELLS_FILE = "cells.json"


def write_report(
    tables: Sequence[ResultTable],
    models: Mapping[str, Mapping[str, Any]],
    evaluations: Mapping[str, Mapping[str, Any]],
    folder: Path,
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write the cells, the pictures, and the page.

    Args:
        tables: one per evaluation, all of the same models.
        models: by name, `checkpoint`, `mitigation`, `fingerprint` and `device`.
        evaluations: by title, the options.
        folder: created if it does not exist.
        notes: sentences at the top of the page.

    Returns:
        The files: `cells.json`, `report.html` and the pictures.
    """
    about = {"models": models, "evaluations": evaluations}
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
    across = "length (tokens)" if table.across == "length" else table.across
    for column in dict.fromkeys(cell.column for cell in table.cells if cell.column.drawn):
        curves: dict[str, dict[int, Estimate]] = {}
        for cell in table.cells:
            if cell.column == column and cell.at is not None and cell.estimate is not None:
                curves.setdefault(cell.model, {})[cell.at] = cell.estimate
        if curves:
            drawn = [Line(name, [*values], [*values.values()]) for name, values in curves.items()]
            place = across if column.listed else "position (tokens)"
            figure = lines(drawn, across=place, up=column.name)
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
