"""Training from Python: `longrnn.train`."""

import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from longrnn import processes
from longrnn.config import RECORDED, read_recorded
from longrnn.console import say
from longrnn.errors import UserError
from longrnn.files import partial_path
from longrnn.locks import locked
from longrnn.progress import Progress
from longrnn.training import checkpoint
from longrnn.training.config import TrainConfig, changes, configured
from longrnn.training.distributed import build_accelerator
from longrnn.training.run import Run, check_new, read_runs, record
from longrnn.training.trainer import Trainer


def train(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    resume: str | Path | None = None,
    minutes: float | None = None,
    quiet: bool = True,
) -> Run:
    """Trains a model to the end, and returns the run, whose folder holds everything.

    Args:
        config: a configuration, its values, or the path or name of a file. With `resume` it is left
            out, or what `resumed` returns.
        overrides: `key=value` with dotted keys.
        resume: the folder of a run, to continue it from its newest checkpoint; or a checkpoint, to
            continue from there in another `output_dir`.
        minutes: a new run has as many steps as they allow, by the speed measured, instead of
            `max_steps`; at least one.
        quiet: print no progress.

    Raises:
        UserError: a value is not valid or does not fit the others; or the folder holds another
            run, or is being written by another process.
        DivergedError: a step was not finite.
    """
    if config is None and resume is not None:
        settings = resumed(Path(resume), overrides, quiet=quiet)
    elif config is not None and (resume is None or isinstance(config, TrainConfig)):
        settings = configured(config, overrides)
    else:
        raise UserError(
            "train takes a configuration, or resume=FOLDER of a run: give one of them, and what "
            "changes as key=value"
        )
    accelerator = build_accelerator(settings)
    folder, origin = Path(settings.output_dir), None if resume is None else Path(resume)
    with ExitStack() as stack:

        def lock_and_find() -> Path | None:
            stack.enter_context(locked(folder, instead="choose another output_dir"))
            return _find(folder, origin)

        start = processes.on_main(lock_and_find)
        trainer = Trainer(settings, accelerator, start, quiet=quiet)
        if minutes is not None and start is None:
            trainer.fit_steps(minutes)
        source = folder if origin is None or origin == folder else origin.parent
        processes.on_main(lambda: record(trainer.config, trainer.step, source))
        trainer.train()
    return read_runs([folder])[0]


def resumed(folder: Path, overrides: Sequence[str], *, quiet: bool = True) -> TrainConfig:
    """The configuration of a run that goes on; prints what the overrides change.

    Args:
        folder: of the run, or of one of its checkpoints.
        overrides: `key=value`.
        quiet: print nothing.

    Raises:
        UserError: the folder has no run, a run is to continue in another folder or a checkpoint in
            its own, or an override cannot change a run that has begun.
    """
    is_branch = checkpoint.CHECKPOINT_NAME.fullmatch(folder.name) is not None
    home = folder.parent if is_branch else folder
    recorded = read_recorded(home)
    if not recorded:
        raise UserError(
            f"{folder} holds no run (it has no train.yaml): give the output_dir of a run, or "
            "start one with `longrnn train CONFIG`"
        )
    old = configured(recorded | {"output_dir": str(home)}, source=str(home / RECORDED))
    if is_branch != any(override.startswith("output_dir=") for override in overrides):
        raise UserError(
            "a resumed run stays in its folder, and one of its checkpoints continues in another: "
            "give --resume RUN, or --resume RUN/checkpoint-00000500 output_dir=FOLDER"
        )
    new = configured(old, overrides)
    # The base of an adapter is read again, and may be in another place.
    fixed = ["peft"] if new.peft and old.peft else ["peft", "init_from", "tokenizer", "fill"]
    if new.learns_state != old.learns_state:
        fixed.append("initial_state")
    for key in fixed:
        if getattr(new, key) != getattr(old, key):
            raise UserError(
                f"{key} determines how a run starts, and {folder} has started: leave it out, or "
                f"start a new run with init_from={folder}"
            )
    for line in changes(old, new) if processes.is_first() and not quiet else ():
        say(line, error=True)
    return new


def _checkpoint_of(folder: Path, resume: Path) -> Path | None:
    """The checkpoint `resume`, or the last one of the run in `folder`, which that may be."""
    found = next(reversed(checkpoint.checkpoints(folder)), None) if resume == folder else resume
    if found is not None:
        checkpoint.check(found)
    return found


def _find(folder: Path, resume: Path | None) -> Path | None:
    """The checkpoint to continue from, in the folder of the run, which holds no other run."""
    if resume != folder:
        check_new(folder, allowed=[] if resume is None else [folder / resume.name])
    origin = None if resume is None else _checkpoint_of(folder, resume)
    checkpoint.clean(folder)
    if origin is None or origin.parent == folder:
        return origin
    if not (folder / origin.name).exists():
        partial = partial_path(folder / origin.name)
        shutil.copytree(origin, partial)
        partial.rename(folder / origin.name)
    return folder / origin.name


def dry_run(config: TrainConfig, resume: Path | None = None, *, quiet: bool = False) -> str:
    """Sets a run up, does two steps and writes nothing; returns their memory and speed in words."""
    origin = None if resume is None else _checkpoint_of(Path(config.output_dir), resume)
    trainer = Trainer(config, build_accelerator(config), origin, quiet=quiet)
    left = config.max_steps - trainer.step
    trainer.train_step()  # the first one is slower
    trainer.step += 1
    counted, begun = trainer.tokens, time.monotonic()
    trainer.train_step()
    seconds, tokens = time.monotonic() - begun, trainer.tokens - counted
    if trainer.accelerator.device.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of tensors on the GPU"
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        per_gib = 2**30 if sys.platform == "darwin" else 2**20  # of bytes, or of KiB
        memory = f"{used / per_gib:.2f} GiB of the process"
    return (
        f"Peak memory of a step: {memory}. Speed: {tokens / seconds:,.0f} tokens/s; {left:,} steps "
        f"take about {Progress.format_interval(left * seconds)} without validation"
    )
