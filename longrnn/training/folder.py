"""The output folder of a run: which run it holds, and what a resumed run may change."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longrnn.checksums import damage
from longrnn.config import dump_config, read_recorded
from longrnn.errors import UserError
from longrnn.files import leftovers, naming, write_atomic
from longrnn.locks import FOLDER_LOCK, Lock
from longrnn.training import checkpoint, extension, replay
from longrnn.training.config import TrainConfig
from longrnn.training.differences import differences

# What a run writes into its output folder itself.
FILES = ("train.yaml", "metrics.jsonl", "config.json", "model.safetensors")
FILES += ("README.md", "tracker-id", "adapter_model.safetensors", "adapter_config.json")
FILES += ("tokenizer.json", "tokenizer_config.json", "checksums.json")
# Keys that may change between the parts of one run without changing what it computes so far.
HARMLESS = {"output_dir", "save_steps", "save_total_limit", "logging_steps", "num_processes"}
HARMLESS |= {"shard_size", "gradient_checkpointing"}
HARMLESS |= {"push_to_hub", "hub_model_id", "hub_private_repo"}
HARMLESS |= {"report_to", "nonfinite", "on_spike", "spike_threshold", "per_device_eval_batch_size"}
# Keys that may also change after a stop at a loss or gradient that is not finite.
REMEDIES = {"learning_rate", "max_grad_norm", "max_grad_value", "mixed_precision"}
# Keys that may also change where a run continues from a checkpoint of another one.
SCHEDULE = {"max_steps", "lr_scheduler_type", "learning_rate", "warmup_steps", "decay_steps"}
SCHEDULE |= {"min_lr", "min_lr_rate", "resume_from_checkpoint"}
SCHEDULE |= {"eval_steps", "eval_length", "eval_samples", "metric_for_best_model"}
SCHEDULE |= {"load_best_model_at_end", "early_stopping_patience"}


class Found(NamedTuple):
    """The checkpoints in the output folder of a run.

    Attributes:
        checkpoint: the one to resume from; None for a new run.
        damaged: newer checkpoints, with the damage of each.
        decayed: newer checkpoints of a decay that a longer run has later.
    """

    checkpoint: Path | None
    damaged: dict[Path, str]
    decayed: Sequence[Path] = ()


def find(
    config: TrainConfig, lock: Lock, *, resume: bool, processes: int, extend: bool = False
) -> Found:
    """Locks the output folder of a run and finds its checkpoints, without changing them.

    Args:
        config: the run; a `tokenizer` or `model` that is not given is that of the folder.
        lock: of the output folder; held when this returns, released when it raises.
        resume: whether a run of the same configuration may be in the folder.
        processes: number of processes, which read different rows.
        extend: whether the run in the folder becomes longer.

    Raises:
        UserError: another process writes into the folder; or it holds another run, or this run
            without `resume`, with more steps, with another number of processes, or with damaged
            checkpoints only.
    """
    lock.acquire()
    try:
        return _find(config, resume=resume, processes=processes, extend=extend)
    except BaseException:
        lock.release()
        raise


def _find(config: TrainConfig, *, resume: bool, processes: int, extend: bool) -> Found:
    """`find`, in a folder that no other process writes into."""
    output_dir = Path(config.output_dir)
    _check_owner(output_dir, config, resume=resume, extend=extend)
    limit = extension.decay_start(output_dir, config) if extend else None
    found, damaged = checkpoint.newest_whole(output_dir, limit)
    if found is not None:
        _check_fits(found, config, processes)
    elif config.resume_from_checkpoint is not None:
        _check_origin(Path(config.resume_from_checkpoint), config, processes)
    decayed = extension.later(output_dir, limit, found) if limit is not None else []
    return Found(found, damaged, decayed)


def claim(config: TrainConfig, found: Found) -> None:
    """Prepares the output folder of a run: creates it if missing, and writes `train.yaml`.

    A newest checkpoint that is damaged is named on standard error and set aside.

    Args:
        config: the run, with its model and tokenizer.
        found: the result of `find`.
    """
    output_dir = Path(config.output_dir)
    newest, damaged, decayed = found
    recorded = output_dir / "train.yaml"
    # First, so that a kill leaves a run that can still be extended.
    for path in decayed:
        checkpoint.set_aside(path, "decayed")
    if newest is not None and differences(read_recorded(output_dir), config, HARMLESS):
        _keep_history(output_dir, checkpoint.steps(newest))
    write_atomic(recorded, dump_config(config))
    _clean(output_dir)
    for path, wrong in damaged.items():
        aside = checkpoint.set_aside(path)
        print(
            f"warning: {path} is damaged ({wrong}) and now named {aside.name}: "
            f"continuing from {newest}",
            file=sys.stderr,
        )
    cut_metrics(output_dir, checkpoint.steps(newest) if newest is not None else 0)


def _check_owner(output_dir: Path, config: TrainConfig, *, resume: bool, extend: bool) -> None:
    """Raises UserError for a folder that does not belong to this run."""
    recorded = output_dir / "train.yaml"
    if recorded.is_file():
        allowed = HARMLESS | (REMEDIES if _stopped(output_dir) else set())
        allowed |= {"max_steps"} if extend else set()
        difference = differences(read_recorded(output_dir), config, allowed)
        if difference:
            steps_only = not differences(read_recorded(output_dir), config, allowed | {"max_steps"})
            remedy = "add --extend-to STEPS for a longer run, or " if steps_only else ""
            raise UserError(
                f"{output_dir} holds a run with another configuration ({difference}): "
                f"{remedy}choose another output_dir"
            )
        if not resume:
            raise UserError(
                f"{output_dir} holds this run already: add --resume to continue it, or choose "
                "another output_dir"
            )
    elif extend:
        raise UserError(f"{output_dir} holds no run to extend: train it first, without --extend-to")
    # A kill during the first write below leaves a partial file, which does not count.
    elif set(output_dir.iterdir()) - {*leftovers(recorded), output_dir / FOLDER_LOCK}:
        raise UserError(f"{output_dir} is not empty and holds no run: choose another output_dir")


def _check_fits(found: Path, config: TrainConfig, processes: int) -> None:
    """Raises UserError for a checkpoint that this run cannot resume from."""
    done = checkpoint.steps(found)
    if done > config.max_steps:
        raise UserError(
            f"{found.parent} holds {done} steps, more than max_steps={config.max_steps}: set "
            f"max_steps={done} or more"
        )
    wrote = checkpoint.processes(found)
    if wrote != processes:
        raise UserError(
            f"{found} was written by {wrote} processes and this run has {processes}: launch as "
            "many as before"
        )


def _check_origin(origin: Path, config: TrainConfig, processes: int) -> None:
    """Raises UserError for a `resume_from_checkpoint` that this run cannot continue from."""
    if not checkpoint.NAME.fullmatch(origin.name) or not (origin / "training.pt").is_file():
        raise UserError(
            f"resume_from_checkpoint={origin} is not a training checkpoint: give a folder such as "
            "runs/mine/checkpoint-00000500, or set init_from to start from a model alone"
        )
    if (wrong := damage(origin)) is not None:
        raise UserError(f"{origin} is damaged ({wrong}): give another checkpoint")
    recorded = read_recorded(origin.parent)
    if not recorded:
        raise UserError(f"{origin} has no train.yaml in the folder above: put it back from a copy")
    # The validation data may differ in every option.
    recorded["validation"] = config.validation
    difference = differences(recorded, config, HARMLESS | SCHEDULE)
    if difference:
        raise UserError(
            f"resume_from_checkpoint={origin} is of a run with another configuration "
            f"({difference}): set these keys as there, or start from its model with init_from"
        )
    _check_fits(origin, config, processes)


def _keep_history(output_dir: Path, step: int) -> None:
    """Keeps the configuration of the steps up to `step`, which no checkpoint holds.

    It is the one recorded now, unless the run has changed before and goes back to here: then it is
    the one of the first change after `step`, and the changes after `step` are no longer true.
    """
    target = output_dir / f"train-until-{step:08d}.yaml"
    kept = sorted(output_dir.glob("train-until-*.yaml"))
    undone = [path for path in kept if path.name >= target.name]
    source = undone[0] if undone else output_dir / "train.yaml"
    write_atomic(target, source.read_text())
    for path in undone:
        if path != target:
            path.unlink()


def _clean(output_dir: Path) -> None:
    """Removes partial files that a kill left."""
    for unfinished in output_dir.glob(".checkpoint-*.partial"):
        shutil.rmtree(unfinished)
    for name in FILES:
        for unfinished in leftovers(output_dir / name):
            unfinished.unlink()


def _stopped(output_dir: Path) -> bool:
    """Whether a step was not finite after the newest checkpoint."""
    failed = [replay.steps(path) for path in replay.files(output_dir)]
    saved = [checkpoint.steps(path) for path in checkpoint.checkpoints(output_dir)]
    return max(failed, default=0) > max(saved, default=0)


def append_metrics(output_dir: Path, row: dict[str, float]) -> None:
    """Adds a row to `metrics.jsonl` and makes it durable: no checkpoint is newer than its rows."""
    path = output_dir / "metrics.jsonl"
    with naming(path), open(path, "a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_metrics(output_dir: Path, step: int) -> None:
    """Drops the rows of steps after `step`, which will be run again, and a torn last row."""
    path = output_dir / "metrics.jsonl"
    if not path.is_file():
        return
    *lines, _ = path.read_text(errors="replace").split("\n")
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            done = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            print(f"warning: {path}, line {number}, is damaged and left out", file=sys.stderr)
            continue
        if done <= step:
            kept.append(f"{line}\n")
    write_atomic(path, "".join(kept))
