"""Training checkpoints: folders that are written, synced and then renamed into place.

`checkpoint-00000500/` holds a model that `load` reads, `training.pt` (optimizer, random state,
counters), one `carry-RANK.pt` per process with what its initial states remember and, written last,
`checksums.json` with the SHA-256 of each of these files. A folder of that name that does not agree
with its checksums was damaged after it was written.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrnn import processes
from longrnn.checksums import damage, write_checksums
from longrnn.errors import UserError
from longrnn.files import one_line, sync_folder, write_atomic
from longrnn.hf import lora
from longrnn.models import RecurrentLM
from longrnn.text import Tokenizer
from longrnn.training import models
from longrnn.training.distributed import gathered, sharded_like, together

NAME = re.compile(r"checkpoint-(\d{8})")


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


def newest(output_dir: Path) -> Path | None:
    """The newest checkpoint of a run, compared with its checksums; None if there is none."""
    found = checkpoints(output_dir)
    if found:
        check(found[-1])
    return found[-1] if found else None


def check(folder: Path) -> None:
    """Raises UserError for a damaged checkpoint."""
    if (wrong := damage(folder)) is not None:
        raise UserError(
            f"{folder} is damaged ({wrong}): put it back from a copy, or remove it to continue "
            "from an earlier checkpoint"
        )


def _beside(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return output_dir / f".checkpoint-{step:08d}.partial"


def _publish(output_dir: Path, step: int) -> None:
    """Renames a written checkpoint into place."""
    write_checksums(_beside(output_dir, step), ("*",))
    os.replace(_beside(output_dir, step), folder_of(output_dir, step))
    sync_folder(output_dir)


def prune(output_dir: Path, keep: int, pinned: int | None) -> None:
    """Removes all checkpoints but the newest `keep` and that of the step `pinned`."""
    for old in checkpoints(output_dir)[:-keep]:
        if steps(old) != pinned:
            # Renamed first, so that a partly deleted folder does not count as a checkpoint.
            unnamed = _beside(output_dir, steps(old))
            os.replace(old, unnamed)
            shutil.rmtree(unnamed)


def clean(output_dir: Path) -> None:
    """Removes partial checkpoints that a kill left."""
    for unfinished in output_dir.glob(".checkpoint-*.partial"):
        shutil.rmtree(unfinished)


def save(
    output_dir: Path,
    counters: dict[str, Any],
    model: RecurrentLM,
    optimizer: torch.optim.Optimizer,
    carried: dict[str, Tensor],
    tokenizer: Tokenizer,
    base: str | None,
) -> None:
    """Writes a checkpoint; either all processes succeed or none does.

    Args:
        output_dir: of the run.
        counters: plain values; `step` is the number of finished steps.
        model: equal in all processes, or sharded over them.
        optimizer: likewise.
        carried: what the policy of initial states remembers in this process.
        tokenizer: of the model.
        base: the checkpoint whose adapters are trained, if they are.

    Raises:
        UserError: a weight is not finite.
        OSError: in all processes, where one of them cannot write its part.
    """
    step = counters["step"]
    if folder_of(output_dir, step).exists():
        return
    beside = _beside(output_dir, step)
    moments = {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    weights, moments = gathered(model.state_dict()), gathered(moments)

    def write() -> None:
        beside.mkdir(parents=True, exist_ok=True)
        _write(beside / f"carry-{processes.rank()}.pt", carried)
        if processes.is_main():
            models.save(model, beside, tokenizer, weights, base)
            content = {**counters, "optimizer": moments, "random": torch.get_rng_state()}
            _write(beside / "training.pt", content)

    try:
        together(write)
        processes.on_main(lambda: _publish(output_dir, step))
    except OSError:
        # A half-written checkpoint would only fill the disk.
        shutil.rmtree(beside, ignore_errors=True)
        raise


def save_final(
    output_dir: Path, model: RecurrentLM, tokenizer: Tokenizer, base: str | None
) -> None:
    """Writes the model into the output folder itself."""
    weights = gathered(model.state_dict())
    processes.on_main(lambda: models.save(model, output_dir, tokenizer, weights, base))


def load_weights(folder: Path, model: RecurrentLM) -> None:
    """Fills a model from a checkpoint.

    Raises:
        UserError: the checkpoint is damaged, or its weights are not finite.
    """
    own = model.state_dict()
    weights = {name: sharded_like(x, own[name]) for name, x in models.read(model, folder).items()}
    # A checkpoint of adapters has the trained weights only.
    model.load_state_dict(weights, strict=not lora.has_adapters(model))


def restore(
    folder: Path, model: RecurrentLM, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fills model and optimizer from a checkpoint.

    Returns:
        The counters, and what the policy of initial states remembered in this process.

    Raises:
        UserError: the checkpoint is of another number of processes or another model.
    """
    wrote = len(list(folder.glob("carry-*.pt")))
    if wrote != processes.size():
        raise UserError(
            f"{folder} was written by {wrote} processes and this run has {processes.size()}: "
            "launch as many as before"
        )
    content = read_tensors(folder / "training.pt")
    carried = read_tensors(folder / f"carry-{processes.rank()}.pt")
    try:
        load_weights(folder, model)
        parameters = dict(model.named_parameters())
        for name, values in content["optimizer"].items():
            like = parameters[name]
            optimizer.state[like] = {
                # A number of steps has no axes and belongs to every process.
                key: sharded_like(value, like) if value.ndim else value.to(like.device)
                for key, value in values.items()
            }
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"{folder} does not fit the model and optimizer of this run ({one_line(error)}): "
            f"start a new run from it with init_from={folder}"
        ) from error
    torch.set_rng_state(content["random"])
    return content, carried


def _write(path: Path, content: Any) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomic(path, buffer.getbuffer())


def read_tensors(path: Path) -> Any:
    """Reads a `.pt` file of a checkpoint: tensors and plain values, never code."""
    return torch.load(path, weights_only=True, map_location="cpu")
