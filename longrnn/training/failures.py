"""What a run does at a step whose loss or gradient is not finite."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from longrnn.errors import DivergedError
from longrnn.state import LMState
from longrnn.tasks import Batch
from longrnn.training import finite, replay
from longrnn.training.processes import on_main

if TYPE_CHECKING:
    from longrnn.training.trainer import Trainer

# With `nonfinite: skip`, a run stops after this many skipped steps in a row.
MOST_SKIPPED = 10


def is_nonfinite(trainer: Trainer, norm: Tensor | None, loss: Tensor) -> bool:
    """Whether the loss of this process, or the norm of the gradient, is not finite."""
    # With fp16, gradients overflow regularly, and the scaler skips such steps itself.
    scaled = trainer.accelerator.scaler is not None
    checked = [loss] if norm is None or scaled else [loss, norm]
    return not all(bool(value.isfinite().all()) for value in checked)


def discard_step(trainer: Trainer) -> None:
    """Discards a step that was not finite; stops the run, or continues with the next step.

    Streams that were not finite continue from zero, since their carried state may be the cause.

    Raises:
        UserError: `nonfinite` is `stop`, or too many steps in a row were skipped.
    """
    config, accelerator = trainer.config, trainer.accelerator
    discard_gradients(trainer)
    path, micros = batch_file(trainer, "nonfinite"), micro_batches(trainer)
    where, finite_rows = replay.save_failure(accelerator, trainer.whole_objective(), micros, path)
    trainer.skipped += 1
    trainer.skipped_in_a_row += 1
    if config.nonfinite == "stop" or trainer.skipped_in_a_row == MOST_SKIPPED:
        _stop(trainer, path, where)
    if accelerator.is_main_process:
        print(f"warning: step {trainer.step + 1} is skipped: {where}; see {path}", file=sys.stderr)
        for old in replay.files(trainer.output_dir)[: -config.save_total_limit]:
            old.unlink()
    for micro, rows in enumerate(finite_rows):
        trainer.starts.restart(~rows, micro)
    leave_out(trainer, range(trainer.data_step, trainer.data_step + 1))


def discard_gradients(trainer: Trainer) -> None:
    """Discards the gradients of a step that does not reach the weights."""
    trainer.optimizer.zero_grad()
    if trainer.accelerator.scaler is not None:
        # Its record of the step: without this it refuses to unscale the next gradients.
        trainer.accelerator.scaler.update()


def leave_out(trainer: Trainer, steps: range) -> None:
    """Restarts streams in which a document begins in batches that are left out.

    Their carried state is that of another document than the one that they continue with.

    Args:
        trainer: has the carried states from before these batches.
        steps: of the batches, as `data_step` counts them.
    """
    if trainer.source.streams:
        for micro in range(trainer.config.gradient_accumulation_steps):
            trainer.starts.restart(trainer.source.begins(steps, micro), micro)


def check_weights(trainer: Trainer) -> None:
    """Refuses to save weights or optimizer state that are not finite.

    Raises:
        UserError: a weight, or an entry of the optimizer, is not finite.
    """
    name = finite.unfit(trainer.accelerator, trainer.model, trainer.optimizer)
    if name is None:
        return
    path, micros = batch_file(trainer, "nonfinite"), micro_batches(trainer)
    where = f"after step {trainer.step}, {name} is not finite"
    replay.save_failure(trainer.accelerator, trainer.whole_objective(), micros, path, where=where)
    raise DivergedError(finite.advice(trainer.config, path, where, done=trainer.step, batch=False))


def batch_file(trainer: Trainer, why: str) -> Path:
    """Where the batch of the step after `trainer.step` is kept."""
    return trainer.output_dir / f"{why}-{trainer.step + 1:08d}.pt"


def micro_batches(trainer: Trainer) -> list[tuple[list[Batch], LMState]]:
    """The micro-batches of the step after `trainer.step`, each with its initial state."""
    count = trainer.config.gradient_accumulation_steps
    return [trainer.micro_batch(micro) for micro in range(count)]


def _stop(trainer: Trainer, path: Path, where: str) -> NoReturn:
    """Stops the run at a step that was not finite.

    If several batches failed in a row, the weights are the cause: a checkpoint of the same
    weights is set aside, so that the run resumes from an earlier one.
    """
    config, many = trainer.config, trainer.skipped_in_a_row
    done = trainer.step + 1 - many  # steps before the weights were last changed
    aside: list[str] = []
    if many == MOST_SKIPPED:
        where += f", as in each of the {many} steps in a row that were skipped"
        work = partial(finite.set_aside, trainer.output_dir, done)
        aside = on_main(trainer.accelerator, work)
    batch = config.nonfinite == "stop"
    raise DivergedError(finite.advice(config, path, where, done=done, batch=batch, aside=aside))
