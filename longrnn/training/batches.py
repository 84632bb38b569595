"""The batches of a run: functions of its configuration, the step and the process alone."""

from __future__ import annotations

from longrnn import processes
from longrnn.data import Batch, Task, Text
from longrnn.errors import UserError
from longrnn.training.config import TrainConfig


def segments(task: Task, config: TrainConfig, step: int, micro: int) -> list[Batch]:
    """The rows of this process for one micro-batch of a step, on the CPU.

    Consecutive segments of carried rows, `segments_per_step` of them, or one batch of independent
    rows. The batch of all processes does not depend on their number. Carried rows are numbered over
    all micro-batches and processes, and stay in their process.
    """
    world, n_micro = processes.size(), config.gradient_accumulation_steps
    rows, carried = config.per_device_train_batch_size, config.carries
    if carried:
        count = config.segments_per_step
        indices = range(step * count, (step + 1) * count)
        first, of = (micro * world + processes.rank()) * rows, n_micro * world * rows
    else:
        indices = range(step * n_micro + micro, step * n_micro + micro + 1)
        first, of = processes.rank() * rows, world * rows
    how = {"of": of, "length": config.length.max, "seed": config.seed, "carried": carried}
    return [task.batch(index, range(first, first + rows), **how) for index in indices]


def check_length(task: Task, config: TrainConfig, positions: int | None) -> None:
    """Refuses rows that the task cannot make, or that exceed the positions of the model.

    Raises:
        UserError: such rows.
    """
    if config.carries and not task.carries:
        raise UserError(
            f"the task {type(task).__name__} has no documents longer than one row: train it "
            "with initial_state={kind: zero}"
        )
    if isinstance(task, Text) and not task.answers and config.length.max > task.corpus.places:
        raise UserError(
            f"length.max is {config.length.max:,}, and all documents together have "
            f"{task.corpus.places:,} tokens to predict: set length.max to at most that, or give "
            "more text"
        )
    longest = segments(task, config, 0, 0)[0].tokens.shape[1]
    if positions is not None and (config.carries or positions < longest):
        rows = "documents of any length" if config.carries else f"rows of {longest} tokens"
        raise UserError(
            f"the model has {positions} positions and this run has {rows}: set a larger "
            "model.position.max_length, lower length.max, or use model.position={kind: sinusoidal}"
        )
