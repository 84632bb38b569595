"""Checks of configuration keys that belong together, one function per feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrnn.errors import UserError

if TYPE_CHECKING:
    from longrnn.training.config import TrainConfig

WITH_MINIMUM = "cosine_with_min_lr"


def check_features(config: TrainConfig) -> None:
    """Refuses keys that contradict one another, or that do not apply.

    Raises:
        UserError: such keys.
    """
    _check_minimum(config)
    _check_validation(config)
    _check_peft(config)


def _check_minimum(config: TrainConfig) -> None:
    """Refuses a schedule without its minimum, and a minimum without its schedule."""
    given = {
        name: value
        for name, value in (("min_lr", config.min_lr), ("min_lr_rate", config.min_lr_rate))
        if value is not None
    }
    if config.lr_scheduler_type != WITH_MINIMUM:
        for name, value in given.items():
            raise UserError(
                f"{name}={value} does not apply to lr_scheduler_type={config.lr_scheduler_type}: "
                f"leave it out, or set lr_scheduler_type={WITH_MINIMUM}"
            )
        return
    if len(given) != 1:
        found = "both are given" if given else "neither is given"
        raise UserError(
            f"lr_scheduler_type={WITH_MINIMUM} takes either min_lr or min_lr_rate, and {found}: "
            "set one of them, such as min_lr_rate=0.1"
        )
    if config.min_lr is not None and config.min_lr > config.learning_rate:
        raise UserError(
            f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}: lower it"
        )


def _check_validation(config: TrainConfig) -> None:
    """Refuses keys that need a validation, without one."""
    if config.validation:
        return
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if value := getattr(config, name):
            raise UserError(
                f"{name}={value} needs evaluations: set validation, such as "
                "validation={kind: text, files: [held_out.txt]}"
            )


def _check_peft(config: TrainConfig) -> None:
    """Refuses adapters without a base, and keys that change or freeze the base."""
    if config.peft is None:
        return
    if config.init_from is None:
        raise UserError("peft trains an adapter of a checkpoint: set init_from to that checkpoint")
    if not config.peft.targets:
        raise UserError("peft.targets is empty: name modules such as [in_proj, out_proj]")
    for name in ("fill", "freeze"):
        if getattr(config, name):
            raise UserError(
                f"{name} changes or freezes weights that peft leaves alone: leave {name} out, and "
                "name what is trained in peft.targets and peft.full"
            )
