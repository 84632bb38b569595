"""A run's folder: its configuration, metrics, checkpoints and final model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter

from longrnn.config import RECORDED, dump_config, flat, read_recorded
from longrnn.errors import UserError
from longrnn.files import append, read_bytes, write_atomic

if TYPE_CHECKING:
    from longrnn.models import LanguageModel
    from longrnn.training.config import TrainConfig

METRICS = "metrics.jsonl"
# Keys that identify a row; its other keys are metrics.
COUNTS = ("step", "tokens")
MetricsRow = dict[str, Any]
_Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_ROW = TypeAdapter(dict[str, _Integer | float], config=ConfigDict(strict=True))


class Run(NamedTuple):
    """A training run.

    Attributes:
        name: of the folder, or its path where several runs have the same name.
        folder: the `output_dir`.
        rows: of its metrics, in order.
        settings: its configuration as dotted keys.
    """

    name: str
    folder: Path
    rows: list[MetricsRow]
    settings: dict[str, Any]

    def model(self) -> LanguageModel:
        """The trained model, as `longrnn.load` reads it."""
        from longrnn.checkpoints.load import load

        return load(str(self.folder))

    def last(self, metric: str) -> float | None:
        """The last finite value of a metric; None if there is none."""
        values = (row[metric] for row in reversed(self.rows) if metric in row)
        return next(filter(math.isfinite, values), None)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads runs, also while they are being written.

    Raises:
        UserError: a folder holds no run, or the run has logged nothing yet.
    """
    distinct = {Path(os.path.realpath(folder)): folder for folder in folders}
    short = [resolved.name for resolved in distinct]
    return [
        Run(
            resolved.name if short.count(resolved.name) == 1 else str(folder),
            folder,
            read_metrics(folder),
            flat(read_recorded(folder)),
        )
        for resolved, folder in distinct.items()
    ]


def read_metrics(folder: Path) -> list[MetricsRow]:
    """The rows of a run's metrics.jsonl; a last line without its end is left out.

    Raises:
        UserError: no row is complete, or one is damaged.
    """
    rows = _parsed(folder / METRICS) if (folder / METRICS).is_file() else []
    if not rows:
        raise UserError(
            f"{folder} holds no training run that has logged metrics: give the output_dir of a run "
            "that has reached its first logging_steps"
        )
    return rows


def _parsed(path: Path) -> list[MetricsRow]:
    rows = []
    # Not `str.splitlines`, which also splits at characters that JSON may hold.
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        try:
            row: MetricsRow = _ROW.validate_json(line)
            if not all(isinstance(row.get(name), int) and row[name] >= 0 for name in COUNTS):
                raise ValueError(f"{COUNTS} are not numbers of steps and tokens")
            rows.append(row)
        except ValueError as error:
            raise UserError(
                f"{path} is damaged in line {number}: put it back from a copy, or remove that line"
            ) from error
    return rows


def check_new(folder: Path, allowed: Sequence[Path] = ()) -> None:
    """Refuses a folder for a new run that is a file or holds something.

    Args:
        folder: may be missing.
        allowed: what may be in it.

    Raises:
        UserError: such a folder.
    """
    if (folder / RECORDED).is_file():
        raise UserError(
            f"{folder} holds a run: continue it with --resume {folder} in place of the "
            "configuration or checkpoint, or choose another output_dir"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another output_dir")
    # What a kill during the first writes leaves does not count.
    others = set(folder.iterdir()) if folder.is_dir() else set()
    if others - {*folder.glob(".*.partial"), *allowed}:
        raise UserError(f"{folder} is not empty and holds no run: choose another output_dir")


def record(config: TrainConfig, step: int, source: Path) -> None:
    """Writes the configuration of a run that goes on after `step` of the run in `source`.

    Also the metrics up to that step; later ones will be logged again, as is a torn last row.
    """
    folder = Path(config.output_dir)
    write_atomic(folder / RECORDED, dump_config(config))
    if (source / METRICS).is_file():
        kept = [json.dumps(row) for row in _parsed(source / METRICS) if row["step"] <= step]
        write_atomic(folder / METRICS, "".join(f"{line}\n" for line in kept))


def append_metrics(folder: Path, row: MetricsRow) -> None:
    """Adds a row to the metrics and makes it durable: no checkpoint is newer than its rows."""
    append(folder / METRICS, f"{json.dumps(row)}\n".encode())
