"""Passkey retrieval in a suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from longrnn.comparison.suites.base import (
    EVALUATIONS,
    Evaluation,
    Measurement,
    Metric,
    sorted_lengths,
)
from longrnn.data import Passkey
from longrnn.data.prompts import Needle, keys
from longrnn.errors import UserError
from longrnn.evaluation import passkey
from longrnn.evaluation.passkey_grid import Grid
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import out_of_reach
from longrnn.intervals import Estimate, paired_proportion, proportion
from longrnn.results import Row


@EVALUATIONS.register("passkey")
class PasskeyRetrieval(Evaluation):
    """Share of recalled keys by length, over all depths.

    Every model gets the same keys at the same depths, in prompts of exactly the same number of its
    own tokens.

    Args:
        title: see `Evaluation`.
        seed: seed of the keys.
        lengths: lengths of the prompts in tokens, such as `[256, 4k]`.
        depths: positions of the key, from 0 to 1.
        n: prompts per length and depth.
        n_keys: keys in one prompt, of which one is queried.
        filler: a text file to hide the keys in; None for the usual sentences.
        batch_size: prompts in one batch.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("lengths", "depths", "n", "batch_size")

    def __init__(
        self,
        title: str,
        seed: int,
        *,
        lengths: list[str],
        depths: list[float] = (0.0, 0.25, 0.5, 0.75, 1.0),  # type: ignore[assignment]
        n: int = 10,
        n_keys: int = 1,
        filler: str | None = None,
        batch_size: int = 8,
    ) -> None:
        super().__init__(title, seed)
        self.lengths, self.depths = sorted_lengths(lengths), list(depths)
        self.n, self.n_keys, self.batch_size = n, n_keys, batch_size
        self.filler = None if filler is None else Path(filler)
        self.texts = [] if self.filler is None else [self.filler]
        self._tasks: dict[str, Passkey] = {}
        if n < 1 or batch_size < 1:
            raise UserError("n and batch_size must be at least 1: set them to positive numbers")
        if not depths or not all(0 <= depth <= 1 for depth in depths):
            raise UserError(
                f"depths must be numbers from 0 to 1, not {list(depths)}: "
                "write some, such as [0, 0.5, 1]"
            )

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        self._tasks = passkey.tasks_of(models, self._grid(self.lengths))

    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        task = self._tasks[model.name]
        number = int(self.n_keys > 1)
        needles = [Needle(key, 0.5, number) for key in keys(True)[::97]]
        answer = max(len(task.answer(needle)) for needle in needles)
        reasons = {n: out_of_reach(model.model, n + answer) for n in self.lengths}
        reached = [length for length, reason in reasons.items() if reason is None]
        samples: dict[int, dict[str, float]] = {length: {} for length in self.lengths}
        by_length: dict[int, list[Row]] = {}
        if reached:
            rows = passkey.evaluate(
                [model],
                self._grid(reached),
                output=output,
                tasks={model.name: task},
                batch_size=self.batch_size,
                quiet=quiet,
            )
            for row in rows:
                samples[row["length"]][f"{row['depth']}/{row['index']}"] = float(row["correct"])
                by_length.setdefault(row["length"], []).append(row)
        return [
            Measurement(self._metric(by_length.get(n, [])), n, samples[n], reasons[n])
            for n in self.lengths
        ]

    def _metric(self, rows: Sequence[Row]) -> Metric:
        """Return the metric of one length; its intervals count overlapping prompts once."""
        count = passkey.independent(rows) if rows else None
        return Metric(
            self.title,
            partial(_share, independent=count),
            partial(paired_proportion, independent=count),
        )

    def _grid(self, lengths: Sequence[int]) -> Grid:
        return Grid(
            lengths, self.n, self.depths, seed=self.seed, filler=self.filler, n_keys=self.n_keys
        )


def _share(values: Sequence[float], independent: float | None) -> Estimate:
    return proportion(round(sum(values)), len(values), independent)
