"""Guards a run against losses that are finite and far above those it has had.

A step whose loss is a spike never reaches the weights. With `on_spike: rollback` the run continues
from its newest checkpoint, without the batches since that checkpoint and that of the spike: with
the same batches, the same weights would meet the same loss again.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from longrnn.errors import UserError
from longrnn.training import checkpoint, failures, replay
from longrnn.training.components import Component
from longrnn.training.config import TrainConfig
from longrnn.training.folder import cut_metrics
from longrnn.training.processes import on_main

if TYPE_CHECKING:
    from longrnn.training.trainer import Trainer

# Losses whose median is the running median.
WINDOW = 50
# The running median counts as at least this share of ln(vocabulary), the loss of a guess: a task
# that is almost solved has batches with many times its median.
FLOOR = 0.2
# A run stops after this many rollbacks to the same checkpoint.
MOST_ROLLBACKS = 3


class SpikeGuard(Component):
    """Compares each loss with the lowest running median of the run.

    The lowest, and not the last one, so that a loss that grows slowly is noticed too.

    Args:
        config: has `on_spike` and `spike_threshold`.
        vocab_size: of the model.

    Attributes:
        skipped_batches: steps whose batches were left out; step s reads those of s + this.
    """

    name = "spikes"

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        self.config = config
        self.floor = FLOOR * math.log(max(2, vocab_size))
        self.losses: list[float] = []
        self.lowest = math.inf
        self.skipped_batches = 0
        self._rollbacks: tuple[Path | None, int] = None, 0

    @property
    def limit(self) -> float:
        """The largest loss that is not a spike; infinite before the first step."""
        return self.config.spike_threshold * max(self.lowest, self.floor)

    def is_spike(self, loss: float) -> bool:
        """Whether the mean loss of a step, over all processes, is a spike."""
        return self.config.on_spike != "ignore" and loss > self.limit

    def record(self, loss: float) -> None:
        """Records the loss of a step that has reached the weights."""
        self.losses = [*self.losses, loss][-WINDOW:]
        self.lowest = min(self.lowest, median(self.losses))

    def rolled_back(self, folder: Path, offset: int) -> int:
        """Records a rollback; returns how many there were to this checkpoint."""
        last, count = self._rollbacks
        self._rollbacks = folder, count + 1 if folder == last else 1
        self.skipped_batches = offset
        return self._rollbacks[1]

    def content(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "lowest": self.lowest,
            "skipped_batches": self.skipped_batches,
        }

    def restore(self, content: dict[str, Any]) -> None:
        self.losses = list(content.get("losses", []))
        self.lowest = content.get("lowest", math.inf)
        self.skipped_batches = content.get("skipped_batches", 0)


def handle(trainer: Trainer, loss: float) -> None:
    """Rolls the run back, or stops it.

    Raises:
        UserError: `on_spike` is `stop`, there is no checkpoint, or the same one was rolled back to
            too often.
    """
    guard, accelerator = trainer.spikes, trainer.accelerator
    failures.discard_gradients(trainer)
    step, offset = trainer.step, trainer.data_step
    where = (
        f"the loss is {loss:.4g}, more than {guard.limit:.4g} (spike_threshold="
        f"{guard.config.spike_threshold:g} times the lowest running median)"
    )
    path, micros = failures.batch_file(trainer, "spike"), failures.micro_batches(trainer)
    replay.save_failure(accelerator, trainer.whole_objective(), micros, path, where=where)
    found, _ = on_main(accelerator, partial(checkpoint.newest_whole, trainer.output_dir))
    if guard.config.on_spike == "stop" or found is None:
        raise UserError(_advice(trainer, where, path, found))
    trainer.restore(found)
    first = trainer.data_step
    if guard.rolled_back(found, offset + 1 - trainer.step) > MOST_ROLLBACKS:
        where += f", after {MOST_ROLLBACKS} rollbacks to {found.name}"
        raise UserError(_advice(trainer, where, path, found))
    failures.leave_out(trainer, range(first, offset + 1))
    on_main(accelerator, partial(cut_metrics, trainer.output_dir, trainer.step))
    if accelerator.is_main_process:
        print(
            f"warning: step {step + 1}: {where}; continuing from {found.name} without the batches "
            f"since then; see {path}",
            file=sys.stderr,
        )
        for old in replay.files(trainer.output_dir)[: -trainer.config.save_total_limit]:
            old.unlink()


def _advice(trainer: Trainer, where: str, path: Path, found: Path | None) -> str:
    """The error message of a run that stops at a spike."""
    lower = f"a lower learning_rate={trainer.config.learning_rate / 2:g} or max_grad_norm"
    if found is None:
        remedy = (
            f"no checkpoint was saved before it: begin again in another output_dir with {lower}"
        )
    else:
        skip = ", or with --resume on_spike=rollback, which leaves batches out"
        rolls = trainer.config.on_spike == "rollback"
        remedy = (
            f"go on from {found.name} by the same command with --resume and {lower}"
            f"{f', or move {found.name} out of the folder first' if rolls else skip}"
        )
    return (
        f"step {replay.steps(path)}: {where}; the batch is kept, to be looked at with `longrnn "
        f"replay {path}`; {remedy}"
    )
