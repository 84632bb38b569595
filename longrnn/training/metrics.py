"""The metrics of training runs: their means over processes, and reading them back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.config import flat, read_recorded
from longrnn.errors import UserError

Row = dict[str, Any]

# Keys that identify a row; its other keys are metrics.
COUNTS = ("step", "tokens")


class Sums:
    """Sums and counts of the values of one step, whose means are taken over all processes.

    Args:
        values: by name, `(n,)` each.
    """

    def __init__(self, **values: Tensor) -> None:
        self.pairs: dict[str, Tensor] = {}  # (sum, count)
        self.add(values)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Adds values, `(n,)` each, to those of the same name."""
        for name, entries in values.items():
            pair = torch.tensor([float(entries.sum()), float(len(entries))])
            self.pairs[name] = self.pairs.get(name, torch.zeros(2)) + pair

    def means(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The mean by name; `total` sums a tensor over processes."""
        totals = total(torch.stack(list(self.pairs.values()))).tolist()
        return {n: s / count for n, (s, count) in zip(self.pairs, totals, strict=True) if count}


class Run(NamedTuple):
    """One run: its unique name, its rows of metrics, its configuration as dotted keys."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]

    def values(self, metric: str) -> list[float]:
        """The finite values of a metric, in order."""
        found = [row[metric] for row in self.rows if metric in row]
        return [value for value in found if math.isfinite(value)]

    def last(self, metric: str) -> float | None:
        """The last finite value; None if there is none."""
        return next(reversed(self.values(metric)), None)

    def least(self, metric: str) -> float | None:
        """The least finite value; None if there is none."""
        return min(self.values(metric), default=None)

    def median(self, metric: str) -> float | None:
        """The median of the finite values; None if there are none."""
        values = self.values(metric)
        return median(values) if values else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads the metrics of runs, also while they are being written.

    Raises:
        UserError: a folder holds no run, or the run has logged nothing yet.
    """
    distinct: dict[Path, Path] = {}
    for folder in folders:
        distinct.setdefault(folder.resolve(), folder)
    short = [resolved.name for resolved in distinct]
    runs = []
    for resolved, folder in distinct.items():
        name = resolved.name
        label = name if short.count(name) == 1 else str(folder)
        runs.append(Run(label, read_metrics(folder), flat(read_recorded(folder))))
    return runs


def read_metrics(folder: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl; a last line without its end is left out.

    Raises:
        UserError: the file is missing, has no complete row, or a line is not a row of metrics.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        begun = (folder / "train.yaml").is_file()
        there = "a run that has logged nothing yet: wait for its first logging_steps"
        missing = "no training run: give the output_dir of one"
        raise UserError(f"{folder} holds {there if begun else missing}")
    rows = []
    # Not `str.splitlines`, which also splits at characters that JSON may hold.
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {len(rows) + 1} is not JSON ({error}): remove that line"
            ) from error
        if not _is_row(row):
            raise UserError(
                f"{path}, line {len(rows) + 1} is not a row of metrics: remove that line"
            )
        rows.append(row)
    if not rows:
        raise UserError(f"{path} has no complete row yet: wait for the run's first logging_steps")
    return rows


def _is_row(row: Any) -> bool:
    """Whether a line of JSON names its step and holds nothing but numbers."""
    return (
        isinstance(row, dict)
        and set(COUNTS) <= row.keys()
        and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in row.values())
    )
