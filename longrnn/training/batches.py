"""The batches of a run: functions of its configuration, the step and the process alone."""

from __future__ import annotations

import random

from longrnn import processes
from longrnn.data import Batch, Task
from longrnn.errors import UserError
from longrnn.seeds import mix
from longrnn.training.config import TrainConfig


def segments(task: Task, config: TrainConfig, step: int, micro: int) -> list[Batch]:
    """The rows of this process for one micro-batch of a step, on the CPU.

    Consecutive segments of carried rows, `segments_per_step` of them, or one batch of independent
    rows. The batch of all processes does not depend on their number. Carried rows are numbered over
    all micro-batches and processes, and stay in their process.
    """
    world, n_micro = processes.size(), config.gradient_accumulation_steps
    rows, length = config.per_device_train_batch_size, config.length.max
    if config.carries:
        count = config.segments_per_step
        indices = range(step * count, (step + 1) * count)
        first, of = (micro * world + processes.rank()) * rows, n_micro * world * rows
    else:
        indices = range(step * n_micro + micro, step * n_micro + micro + 1)
        first, of = processes.rank() * rows, world * rows
        if config.length.min is not None:
            drawn = random.Random(mix(config.seed, step, micro)).random()
            length = round(config.length.min * (length / config.length.min) ** drawn)
    own = range(first, first + rows)
    return [
        task.batch(i, own, of=of, length=length, seed=config.seed, carried=config.carries)
        for i in indices
    ]


def check_length(task: Task, config: TrainConfig, positions: int | None) -> None:
    """Refuses lengths that the task cannot make, or that exceed the positions of the model.

    Raises:
        UserError: such lengths.
    """
    batch = segments(task, config, 0, 0)[0]
    if config.length.min is not None:
        task.sample(1, length=config.length.min)
        batch = task.sample(1, length=config.length.max)
    longest = batch.tokens.shape[1]
    if config.carries:
        most = config.max_steps * config.segments_per_step * config.length.max
        longest = min(most, task.longest(config.length.max) or most) + batch.query_length
    if positions is not None and positions < longest:
        raise UserError(
            f"the model has {positions} positions and this run may reach {longest}: set "
            f"model.position.max_length={longest}, lower length.max, or use "
            "model.position={kind: sinusoidal}"
        )
