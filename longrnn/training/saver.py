"""Writes the checkpoints of a run, and resumes the run from one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from longrnn.errors import UserError
from longrnn.hf import lora
from longrnn.hf.convert import OURS, convert
from longrnn.text import Tokenizer
from longrnn.training import checkpoint, models, sharding
from longrnn.training.config import TrainConfig
from longrnn.training.models import Trained
from longrnn.training.processes import on_main, together


class SaveSchedule:
    """Decides when a checkpoint is written, and when old ones are removed.

    While steps are left out, a due checkpoint waits for the next step that is finite. One that
    cannot wait removes no other. Old checkpoints are removed only after a step from the weights of
    the newest one was finite: finite weights may fail at every batch.

    Args:
        saver: removes old checkpoints.
        save_steps: steps between checkpoints.
        decay_start: a further step after which a checkpoint is due, which is kept; None for none.
        resumed: whether the run started from a checkpoint, whose predecessors may be left.
    """

    def __init__(
        self, saver: Saver, save_steps: int, *, decay_start: int | None, resumed: bool
    ) -> None:
        self.saver, self.save_steps, self.decay_start = saver, save_steps, decay_start
        if decay_start is not None:
            saver.pinned["decay"] = decay_start
        self._is_due = False
        self._prune_due = resumed

    def after_step(
        self, step: int, save: Callable[[], None], *, was_finite: bool, at_once: bool, last: bool
    ) -> None:
        """Calls `save` where a checkpoint is due, and removes old ones.

        Args:
            step: steps done.
            save: writes a checkpoint.
            was_finite: whether the step was.
            at_once: whether a checkpoint is written in any case.
            last: whether no step comes after this one.
        """
        if was_finite and self._prune_due:
            self.saver.prune()
            self._prune_due = False
        self._is_due = self._is_due or step % self.save_steps == 0 or step == self.decay_start
        if not at_once and not (self._is_due and was_finite):
            return
        save()
        self._is_due, self._prune_due = False, True
        if last and was_finite:
            self.saver.prune()


class Saver:
    """Writes and reads the checkpoints of one run; each process handles its own part.

    Args:
        config: the run; `output_dir` and `save_total_limit` are read.
        accelerator: its processes.
        tokenizer: is saved with the model.
        mitigation: under which the model is trained; saved with it.

    Attributes:
        pinned: steps whose checkpoints `prune` keeps, by the reason.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        tokenizer: Tokenizer,
        mitigation: str | None = None,
    ) -> None:
        self.output_dir, self.keep = Path(config.output_dir), config.save_total_limit
        self.accelerator, self.tokenizer = accelerator, tokenizer
        self.pinned: dict[str, int] = {}
        self.mitigation = mitigation
        self.base = config.init_from
        self.merge = config.peft is not None and config.peft.merge

    def save(
        self,
        counters: dict[str, Any],
        model: Trained,
        optimizer: torch.optim.Optimizer,
        carried: dict[str, Tensor],
    ) -> None:
        """Writes a checkpoint; either all processes succeed or none does.

        Args:
            counters: plain values; `step` is the number of finished steps.
            model: equal in all processes, or sharded over them.
            optimizer: likewise.
            carried: what the policy of initial states remembers in this process.

        Raises:
            OSError: in all processes, where one of them cannot write its part.
        """
        step = counters["step"]
        folder = checkpoint.partial(self.output_dir, step)
        is_main = self.accelerator.is_main_process
        weights = sharding.gathered(model.state_dict(), keep=is_main)
        moments = sharding.gathered(optimizer.state_dict(), keep=is_main)

        def write() -> None:
            checkpoint.write_tensors(self._carried(folder), carried)
            if not is_main:
                return
            models.save(model, folder, self.tokenizer, weights, self.mitigation, self.base)
            content = {
                "format": checkpoint.FORMAT,
                **counters,
                "optimizer": moments,
                "random": torch.get_rng_state(),
            }
            if self.accelerator.scaler is not None:
                content["scaler"] = self.accelerator.scaler.state_dict()
            checkpoint.write_tensors(folder / "training.pt", content)

        try:
            together(self.accelerator, write)
            on_main(self.accelerator, partial(checkpoint.publish, self.output_dir, step))
        except OSError:
            # A half-written checkpoint would only fill the disk; what cannot be removed now is
            # removed when the run is resumed.
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _carried(self, folder: Path) -> Path:
        """The file of a checkpoint with the carried states of this process."""
        return folder / f"carry-{self.accelerator.process_index}.pt"

    def prune(self) -> None:
        """Removes all but the newest `save_total_limit` and the pinned checkpoints."""
        if self.accelerator.is_main_process:
            checkpoint.prune(self.output_dir, self.keep, self.pinned.values())

    def write_final(self, model: Trained) -> None:
        """Writes the model into the output folder itself."""
        is_main = self.accelerator.is_main_process
        weights = sharding.gathered(model.state_dict(), keep=is_main)
        arguments = (self.output_dir, self.tokenizer, weights, self.mitigation, self.base)
        on_main(self.accelerator, lambda: models.save(model, *arguments))
        if self.merge:
            on_main(self.accelerator, self._write_merged)

    def _write_merged(self) -> None:
        destination = self.output_dir / "merged"
        shutil.rmtree(destination, ignore_errors=True)
        convert(self.output_dir, destination, to=OURS, merge=True)

    def load_weights(self, folder: Path, model: Trained) -> None:
        """Fills a model from a checkpoint.

        Raises:
            UserError: its weights are not finite.
        """
        weights = models.read(model, folder)
        wrong = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
        if wrong:
            raise UserError(
                f"{folder} holds weights that are not finite (the first is {wrong[0]}): take it "
                "out of the folder, and resume from the one before"
            )
        # A checkpoint of adapters has the trained weights only.
        ours = sharding.sharded_weights(weights, model.state_dict())
        model.load_state_dict(ours, strict=lora.describe(model) is None)

    def restore(
        self, folder: Path, model: Trained, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Fills model and optimizer from a checkpoint.

        Args:
            folder: the checkpoint.
            model: as built at the start of the run.
            optimizer: likewise.

        Returns:
            The counters, and what the policy of initial states remembered.

        Raises:
            UserError: the checkpoint is damaged, of another format or another run, or its weights
                are not finite.
        """
        content = checkpoint.read_training(folder)
        carried = checkpoint.read_tensors(self._carried(folder))
        try:
            self.load_weights(folder, model)
            optimizer.load_state_dict(sharding.sharded_optimizer(content["optimizer"], optimizer))
        except UserError:
            raise
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{folder} does not fit the model and optimizer of this run ({reason}): start a "
                f"new run from it with init_from={folder}"
            ) from error
        torch.set_rng_state(content["random"])
        # A run that switched to fp16 when it was resumed has no scale yet.
        if self.accelerator.scaler is not None and "scaler" in content:
            self.accelerator.scaler.load_state_dict(content["scaler"])
        return content, carried
