"""Training checkpoints: folders that are written, synced and then renamed into place.

`checkpoint-00000500/` holds a model that `load` reads, `training.pt` (optimizer, random state,
counters), one `carry-RANK.pt` per process with the states of its streams and, written last,
`checksums.json` with the SHA-256 of each of these files. A folder of that name that does not agree
with its checksums was damaged after it was written.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from longrnn.checksums import damage, read_checksums, write_checksums
from longrnn.errors import UserError
from longrnn.files import sync_folder, write_atomic

NAME = re.compile(r"checkpoint-(\d{8})")
# Version of the content of `training.pt`; the first version did not record it.
FORMAT = 3
# What `training.pt` must hold, whatever the run.
NEEDED = ("step", "tokens", "pending", "skipped", "skipped_in_a_row", "data")
NEEDED += ("optimizer", "random", "components")


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not output_dir.is_dir():
        return []
    return sorted(path for path in output_dir.iterdir() if NAME.fullmatch(path.name))


def steps(folder: Path) -> int:
    """How many steps a checkpoint has done, by its name."""
    return int(folder.name.removeprefix("checkpoint-"))


def folder_of(output_dir: Path, step: int) -> Path:
    """The checkpoint of a run after `step` steps, whether it exists or not."""
    return output_dir / f"checkpoint-{step:08d}"


def processes(folder: Path) -> int:
    """How many processes wrote a checkpoint."""
    return len(list(folder.glob("carry-*.pt")))


def newest_whole(
    output_dir: Path, at_most: int | None = None
) -> tuple[Path | None, dict[Path, str]]:
    """The newest undamaged checkpoint (None without any), and the damage of each newer one.

    Args:
        output_dir: of the run.
        at_most: leave out checkpoints of more steps.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoints(output_dir)):
        if at_most is not None and steps(folder) > at_most:
            continue
        wrong = damage(folder)
        if wrong is None:
            return folder, damaged
        damaged[folder] = wrong
    if damaged:
        listed = "; ".join(f"{folder.name}: {wrong}" for folder, wrong in damaged.items())
        raise UserError(
            f"no checkpoint in {output_dir} is whole ({listed}): put one back from a copy, or "
            "begin again in another output_dir"
        )
    return None, damaged


def set_aside(folder: Path, why: str = "damaged") -> Path:
    """Renames a checkpoint so that it no longer counts as one, without deleting it.

    Args:
        folder: the checkpoint.
        why: the suffix of its new name.
    """
    aside = folder.with_name(f"{folder.name}.{why}")
    if aside.exists():
        shutil.rmtree(aside)
    os.replace(folder, aside)
    return aside


def partial(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return output_dir / f".checkpoint-{step:08d}.partial"


def publish(output_dir: Path, step: int) -> None:
    """Renames a written checkpoint into place; see `prune`."""
    beside = partial(output_dir, step)
    write_checksums(beside, ("*",), known=read_checksums(beside))
    os.replace(beside, folder_of(output_dir, step))
    sync_folder(output_dir)


def prune(output_dir: Path, keep: int, pinned: Collection[int] = ()) -> None:
    """Removes all checkpoints but the newest `keep` and those of `pinned` steps."""
    for old in checkpoints(output_dir)[:-keep]:
        if steps(old) in pinned:
            continue
        # Renamed first, so that a partly deleted folder does not count as a checkpoint.
        unnamed = partial(output_dir, steps(old))
        os.replace(old, unnamed)
        shutil.rmtree(unnamed)


def read_training(folder: Path) -> dict[str, Any]:
    """The content of `training.pt` of a checkpoint, in the current format.

    Raises:
        UserError: it is damaged, or has a format that this version does not read.
    """
    content = read_tensors(folder / "training.pt")
    version = content.get("format", 1) if isinstance(content, dict) else None
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {version}, and this version of longrnn reads 1 to "
            f"{FORMAT}: update longrnn, or start a new run from it with init_from={folder}"
        )
    if version == 1:  # which did not count skipped steps
        content = {"skipped": 0, "skipped_in_a_row": 0, **content}
    if version < 3:  # which had no components
        content = {"components": {}, **content}
    missing = [name for name in NEEDED if name not in content]
    if missing:
        raise UserError(
            f"{folder} was written by an early version of longrnn and lacks {', '.join(missing)}: "
            f"start a new run from it with init_from={folder}"
        )
    return content


def write_tensors(path: Path, content: Any) -> None:
    """`torch.save`, atomically."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomic(path, buffer.getbuffer())


def read_tensors(path: Path) -> Any:
    """Reads what `write_tensors` wrote: tensors and plain values, never code.

    Raises:
        UserError: missing or damaged.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a file")  # torch.load would wait for a pipe forever
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(
            f"{path} is missing or damaged ({type(error).__name__}): give a file that longrnn "
            "has written"
        ) from error
