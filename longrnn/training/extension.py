"""Extends a run: which checkpoint a longer run continues from.

A schedule that decays at the end of the run (`warmup_stable_decay`) decays later in a longer run.
The longer run therefore continues from the checkpoint before the decay, which every such run keeps,
and equals a run that had the larger `max_steps` from the beginning. With other schedules the run
continues from its last step, and its learning rate is from there on that of the longer schedule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from longrnn.config import read_recorded
from longrnn.errors import UserError
from longrnn.training import checkpoint
from longrnn.training.config import TrainConfig

DECAYS_AT_THE_END = "warmup_stable_decay"


def start_of_decay(config: TrainConfig) -> int | None:
    """The number of steps before the decay; None for a schedule without one."""
    if config.lr_scheduler_type != DECAYS_AT_THE_END or not config.decay_steps:
        return None
    return config.max_steps - config.decay_steps


def extended(config: TrainConfig, steps: int) -> TrainConfig:
    """The configuration of the run with `steps` steps.

    Raises:
        UserError: the run in `output_dir` has as many already, and is not being extended to them.
    """
    recorded = read_recorded(Path(config.output_dir)).get("max_steps")
    if isinstance(recorded, int) and recorded > steps:
        raise UserError(
            f"{config.output_dir} holds a run of {recorded} steps already, and --extend-to is "
            f"{steps}: give more than {recorded}"
        )
    # Its own checks run again, as those of warmup_steps.
    return replace(config, max_steps=steps)


def decay_start(output_dir: Path, config: TrainConfig) -> int | None:
    """The most steps of a checkpoint that a longer run continues from; None for any.

    Args:
        output_dir: holds the run as it was.
        config: the longer run.
    """
    recorded = read_recorded(output_dir)
    if recorded.get("max_steps", config.max_steps) == config.max_steps:
        return None  # the run was extended before, and is resumed
    return start_of_decay(replace(config, max_steps=recorded["max_steps"]))


def later(output_dir: Path, limit: int, found: Path | None) -> list[Path]:
    """The checkpoints of more than `limit` steps, which a longer run does not have.

    Raises:
        UserError: they are all that is left of the run.
    """
    after = [path for path in checkpoint.checkpoints(output_dir) if checkpoint.steps(path) > limit]
    if after and found is None:
        raise UserError(
            f"{output_dir} holds only checkpoints from after step {limit}, when the learning rate "
            "began to decay: put an earlier one back from a copy, or start a new run from its "
            f"model with init_from={output_dir}"
        )
    return after
