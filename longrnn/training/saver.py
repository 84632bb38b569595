"""What a checkpoint of a run holds, and how a run is taken up from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from longrnn.errors import UserError
from longrnn.hf.tokenizer import HFTokenizer
from longrnn.models.checkpoint import load_model, save_model
from longrnn.models.recurrent import RecurrentLM
from longrnn.state import LMState, tree_map
from longrnn.text import Tokenizer
from longrnn.training import checkpoint
from longrnn.training.config import TrainConfig


class Saver:
    """Writes and reads the checkpoints of one run, a part by each process.

    Args:
        config: the run; `output_dir` and `save_total_limit` are read.
        accelerator: its processes.
        tokenizer: what the model is saved with.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, tokenizer: Tokenizer) -> None:
        self.output_dir, self.keep = Path(config.output_dir), config.save_total_limit
        self.accelerator, self.tokenizer = accelerator, tokenizer

    def save(
        self,
        counters: dict[str, Any],
        model: RecurrentLM,
        optimizer: torch.optim.Optimizer,
        carried: list[LMState],
    ) -> None:
        """Writes a checkpoint.

        Args:
            counters: plain values; `step` is how many steps are done.
            model: its weights are equal in all processes.
            optimizer: likewise.
            carried: the states that this process goes on from; none where nothing is carried.
        """
        step = counters["step"]
        folder = checkpoint.partial(self.output_dir, step)
        rank = self.accelerator.process_index
        plain = tree_map(lambda leaf: leaf.cpu(), _plain(carried))
        checkpoint.write_tensors(folder / f"carry-{rank}.pt", plain)
        if self.accelerator.is_main_process:
            self.write_model(model, folder)
            content = {
                **counters,
                "world_size": self.accelerator.num_processes,
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
            }
            checkpoint.write_tensors(folder / "training.pt", content)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint.publish(self.output_dir, step, self.keep)
        self.accelerator.wait_for_everyone()

    def write_model(self, model: RecurrentLM, folder: Path) -> None:
        """A model with its tokenizer, so that the folder can be moved."""
        if isinstance(self.tokenizer, HFTokenizer):
            save_model(model, folder, tokenizer="tokenizer.json")
            self.tokenizer.save(folder)
        else:
            save_model(model, folder)

    def restore(
        self,
        folder: Path,
        model: RecurrentLM,
        optimizer: torch.optim.Optimizer,
        like: list[LMState],
    ) -> tuple[dict[str, Any], list[LMState]]:
        """Fills model and optimizer from a checkpoint.

        Args:
            folder: the checkpoint.
            model: as it was when the run began.
            optimizer: likewise.
            like: states of the structure and on the device of those to be read; may be none.

        Returns:
            The counters and the carried states.

        Raises:
            UserError: the checkpoint is of another number of processes, or damaged.
        """
        content = checkpoint.read_tensors(folder / "training.pt")
        world = self.accelerator.num_processes
        if content["world_size"] != world:
            raise UserError(
                f"{folder} was written by {content['world_size']} processes and this run has "
                f"{world}: launch as many as before"
            )
        model.load_state_dict(load_model(folder).state_dict())
        optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["random"])
        rank = self.accelerator.process_index
        saved = checkpoint.read_tensors(folder / f"carry-{rank}.pt")
        return content, [_refill(s, v) for s, v in zip(like, saved, strict=True)]


def _plain(tree: Any) -> Any:
    """Named tuples as lists, which a safe unpickler reads."""
    return [_plain(item) for item in tree] if isinstance(tree, (tuple, list)) else tree


def _refill(like: Any, values: Any) -> Any:
    """The structure of `like` with the tensors of `values` (as `_plain` made them)."""
    if isinstance(like, tuple):
        branches = [_refill(a, b) for a, b in zip(like, values, strict=True)]
        return type(like)(*branches) if hasattr(like, "_fields") else tuple(branches)
    return values.to(like.device)
