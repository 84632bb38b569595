"""Checks that only finite weights are saved, and the message of a run that stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longrnn.training import checkpoint, replay
from longrnn.training.config import TrainConfig


def unfit(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> str | None:
    """The first weight or optimizer state that is not finite, in words; None where all are.

    All processes must call this, and get the same result.
    """
    found = None
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[tensor] = name
        if found is None and not _all_finite(tensor):
            found = f"the weight {name}"
    for parameter, entries in optimizer.state.items():
        for kind, value in entries.items():
            if found is None and isinstance(value, Tensor) and not _all_finite(value):
                found = f"the optimizer's {kind} of {names.get(parameter, 'a weight')}"
    return next((name for name in gather_object([found]) if name is not None), None)


def _all_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not local.is_floating_point() or bool(local.isfinite().all())


def set_aside(output_dir: Path, done: int) -> list[str]:
    """Renames the checkpoints of `done` steps and more; returns their new names."""
    failed = [
        folder for folder in checkpoint.checkpoints(output_dir) if checkpoint.steps(folder) >= done
    ]
    return [checkpoint.set_aside(folder, "nonfinite").name for folder in failed]


def advice(
    config: TrainConfig,
    path: Path,
    where: str,
    *,
    done: int,
    batch: bool,
    aside: Sequence[str] = (),
) -> str:
    """The error message of a run that stops: what happened at a step, and the remedies.

    Args:
        config: the run.
        path: the file with the batch.
        where: what is not finite.
        done: finished steps of the weights that failed.
        batch: whether the batch alone may be the cause, so that skipping it helps.
        aside: names of the checkpoints of those weights that were set aside.
    """
    saved = checkpoint.checkpoints(path.parent)
    lower = f"a lower learning_rate={config.learning_rate / 2:g} or max_grad_norm"
    skip = "with --resume nonfinite=skip, which leaves such steps out"
    if done == 0:
        again = "begin again in another output_dir from other weights (init_from, fill, model)"
        remedy = f"go on by the same command {skip}, or {again}" if batch else again
    elif saved and checkpoint.steps(saved[-1]) >= done:
        # Weights and batch are those that failed, so a plain resume would fail again.
        remedy = (
            f"go on by the same command {skip}, or move {saved[-1].name}, which holds these "
            f"weights, out of the folder and give --resume and {lower}"
        )
    else:
        start = f"from {saved[-1].name}" if saved else "from the beginning"
        remedy = f"go on {start} by the same command with --resume and {lower}"
        remedy += f", or {skip}" if batch else ""
    named = f"; the weights that failed are in {', '.join(aside)}" if aside else ""
    return (
        f"step {replay.steps(path)}: {where}; the batch is kept, to be looked at with `longrnn "
        f"replay {path}`{named}; {remedy}"
    )
