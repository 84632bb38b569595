"""Training checkpoints: folders written beside, synced, and renamed into place.

`checkpoint-00000500/` holds a model that `load` reads, `training.pt` (optimizer, random state,
counters) and one `carry-RANK.pt` per process with the states of its lanes.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from longrnn.errors import UserError
from longrnn.files import sync_folder, write_atomic

NAME = re.compile(r"checkpoint-(\d{8})")


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    if not output_dir.is_dir():
        return []
    return sorted(path for path in output_dir.iterdir() if NAME.fullmatch(path.name))


def check_steps(output_dir: Path, max_steps: int) -> None:
    """Refuses to resume a run that has more steps than are asked."""
    for folder in checkpoints(output_dir)[-1:]:
        done = int(folder.name.removeprefix("checkpoint-"))
        if done > max_steps:
            raise UserError(
                f"{output_dir} holds {done} steps, more than max_steps={max_steps}: set "
                f"max_steps={done} or more"
            )


def partial(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return output_dir / f".checkpoint-{step:08d}.partial"


def publish(output_dir: Path, step: int, keep: int) -> None:
    """Renames a written checkpoint into place and removes all but the newest `keep`."""
    beside = partial(output_dir, step)
    sync_folder(beside)
    target = output_dir / beside.name.removeprefix(".").removesuffix(".partial")
    if target.exists():
        shutil.rmtree(target)
    os.replace(beside, target)
    sync_folder(output_dir)
    for old in checkpoints(output_dir)[:-keep]:
        shutil.rmtree(old)


def write_tensors(path: Path, content: Any) -> None:
    """`torch.save`, atomically."""
    import io

    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomic(path, buffer.getvalue())


def read_tensors(path: Path) -> Any:
    """Reads what `write_tensors` wrote: tensors and plain values, never code.

    Raises:
        UserError: missing or damaged.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(
            f"{path} is missing or damaged ({type(error).__name__}): remove the folder "
            f"{path.parent} to resume from the checkpoint before it"
        ) from error
