"""Training checkpoints: folders that are written, synced and then renamed into place.

`checkpoint-00000500/` holds a model that `load` reads, `training.pt` (optimizer, counters), one
`carry-RANK.pt` per process with what its initial states remember and, written last,
`checksums.json` with the SHA-256 of each of these files. A folder of that name that does not agree
with its checksums was damaged after it was written.
"""

import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from longrnn import processes
from longrnn.checkpoints.folder import read_tensors
from longrnn.checkpoints.names import INITIAL_STATE
from longrnn.checksums import refuse_damage, write_checksums
from longrnn.errors import DivergedError, UserError, nearest
from longrnn.files import new_folder, partial_path, remove, sync_folder, write_atomic
from longrnn.models import TrainableLM
from longrnn.options import Options, Seed, validated
from longrnn.programs import reason_of
from longrnn.text import Tokenizer
from longrnn.training import models
from longrnn.training.distributed import gathered, sharded_like

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{8})")
REMEDY = "put it back from a copy, or remove it to continue from an earlier one"


class TrainerState(Options, strict=True):
    """The content of `training.pt`; see `Trainer.state_dict`, and `restore`."""

    step: Seed
    tokens: Seed
    skipped: Seed
    pending: dict[str, list[float]]
    data: str | None
    rows: dict[str, JsonValue]
    optimizer: dict[str, dict[str, Tensor]]


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(
        path for path in output_dir.glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name)
    )


def check(folder: Path) -> None:
    """Raises UserError for a checkpoint that is missing or damaged; `load` verifies the model."""
    if not folder.is_dir():
        known = [str(path) for path in checkpoints(folder.parent)]
        raise UserError(f"there is no checkpoint {folder}: {nearest(str(folder), known)}")
    refuse_damage(folder, REMEDY, ("*.pt", "adapter*", INITIAL_STATE))


def clean(output_dir: Path) -> None:
    """Removes partial checkpoints that a kill left."""
    for unfinished in output_dir.glob(".checkpoint-*.partial"):
        remove(unfinished)


def save(
    output_dir: Path,
    trainer: dict[str, Any],
    model: TrainableLM,
    optimizer: torch.optim.Optimizer,
    *,
    carried: dict[str, Tensor],
    tokenizer: Tokenizer,
    keep: int,
) -> None:
    """Writes a checkpoint; either all processes succeed or none does.

    Args:
        output_dir: of the run.
        trainer: plain values of the trainer; `step` is the number of finished steps.
        model: equal in all processes, or sharded over them.
        optimizer: likewise.
        carried: what the policy of initial states remembers in this process.
        tokenizer: of the model.
        keep: how many checkpoints stay, the newest ones.

    Raises:
        DivergedError: a weight is not finite.
        OSError: in all processes, where one of them cannot write its part.
    """
    folder = output_dir / f"checkpoint-{trainer['step']:08d}"
    moments = {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    weights, moments = gathered(model.state_dict()), gathered(moments)
    processes.on_main(lambda: _refuse_nonfinite(weights, folder))
    partial = partial_path(folder)
    processes.on_main(lambda: new_folder(partial))
    failure: OSError | None = None
    try:
        _write(partial / f"carry-{processes.rank()}.pt", carried)
        if processes.is_main():
            models.save(model, partial, weights=weights, tokenizer=tokenizer)
            _write(partial / "training.pt", {**trainer, "optimizer": moments})
    except OSError as error:
        failure = error
    failure = next(filter(None, processes.gather(failure)), None)
    if failure is not None:
        # A half-written checkpoint would only fill the disk.
        shutil.rmtree(partial, ignore_errors=True)
        raise failure
    processes.on_main(lambda: _publish(folder, keep))


def _refuse_nonfinite(weights: Mapping[str, Tensor], folder: Path) -> None:
    if bad := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
        raise DivergedError(
            f"before {folder} the weight {bad[0]} is not finite: go on with --resume "
            f"{folder.parent} and a lower learning_rate"
        )


def _publish(folder: Path, keep: int) -> None:
    """Renames a written checkpoint into place, and removes all but the newest ones."""
    write_checksums(partial_path(folder), ("*.pt",))
    os.replace(partial_path(folder), folder)
    sync_folder(folder.parent)
    for old in checkpoints(folder.parent)[:-keep]:
        # Renamed first, so that a partly deleted folder does not count as a checkpoint.
        os.replace(old, partial_path(old))
        shutil.rmtree(partial_path(old))


def restore(
    folder: Path, model: TrainableLM, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fills the optimizer of a model, which has its weights, from a checkpoint.

    Returns:
        The values of the trainer, and what the policy of initial states remembered in this process.

    Raises:
        UserError: the checkpoint is of another number of processes.
    """
    wrote = len(list(folder.glob("carry-*.pt")))
    if wrote != processes.size():
        raise UserError(
            f"{folder} was written by {wrote} processes and this run has {processes.size()}: "
            "launch as many as before"
        )
    with refuse_misfit(folder):
        values = read_tensors(folder / "training.pt")
        content: TrainerState = validated(TrainerState, values, "training.pt")
        if content.step > content.skipped and not content.optimizer:
            raise ValueError("it has no state of the optimizer")
        parameters = dict(model.named_parameters())
        for name, moments in content.optimizer.items():
            like = parameters[name]
            # A number of steps has no axes and belongs to every process.
            optimizer.state[like] = {"step": moments["step"].view(()).to(like.device)}
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[like][key] = sharded_like(moments[key].view(like.shape), like)
        return values, read_tensors(folder / f"carry-{processes.rank()}.pt")


@contextmanager
def refuse_misfit(folder: Path) -> Iterator[None]:
    """Within this context, content of a checkpoint that does not fit the run is refused.

    Raises:
        UserError: such content.
    """
    try:
        yield
    except Exception as error:  # damaged content raises errors of many kinds
        raise UserError(f"{folder} is damaged ({reason_of(error)}): {REMEDY}") from error


def _write(path: Path, content: Any) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomic(path, buffer.getbuffer())
