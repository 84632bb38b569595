"""Evaluates a run, keeps the checkpoint of the best evaluation, and ends with its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrnn.checksums import damage
from longrnn.errors import UserError
from longrnn.training import checkpoint

if TYPE_CHECKING:
    from longrnn.training.trainer import Trainer

BEST = "best"


def evaluate(trainer: Trainer) -> bool:
    """Evaluates where that is due; returns whether the model is to be saved as the best one."""
    validation = trainer.validation
    if validation is None or not validation.due(trainer.step):
        return False
    values = validation.evaluate(
        trainer.whole_objective(), trainer.step, trainer.accelerator.device, trainer.total
    )
    trainer.record(values)
    improved = validation.best is not None and validation.best.step == trainer.step
    if trainer.config.load_best_model_at_end and improved:
        trainer.saver.pinned[BEST] = trainer.step
        return True
    return False


def restore(trainer: Trainer) -> None:
    """Keeps the best checkpoint of a resumed run; without it, the next evaluation is the best."""
    validation = trainer.validation
    if validation is None or validation.best is None or not trainer.config.load_best_model_at_end:
        return
    step = validation.best.step
    if checkpoint.folder_of(trainer.output_dir, step).is_dir():
        trainer.saver.pinned[BEST] = step
    else:
        trainer.say(f"warning: the checkpoint of the best step, {step}, is missing and not used")
        validation.best = None


def load(trainer: Trainer) -> None:
    """Fills the model from the checkpoint of the best evaluation, if the run asks for it.

    Raises:
        UserError: that checkpoint is damaged.
    """
    step = trainer.saver.pinned.get(BEST)
    if step is None:
        return
    folder = checkpoint.folder_of(trainer.output_dir, step)
    if (wrong := damage(folder)) is not None:
        raise UserError(
            f"{folder}, the best checkpoint, is damaged ({wrong}): put it back from a copy, or "
            "give the command again with load_best_model_at_end=false in another output_dir"
        )
    trainer.saver.load_weights(folder, trainer.model)
    trainer.say(f"the final model is that of step {step}, the best evaluation")
