"""Configurations for fine-tuning a published checkpoint on long documents.

`configs/train/finetune_mamba2.yaml` holds the same settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.hf.names import split_spec
from longrnn.tasks.held_out import HELD_OUT, TRAINING
from longrnn.training import models
from longrnn.training.config import TrainConfig
from longrnn.training.data import Source
from longrnn.training.initial_states import uses_streams
from longrnn.training.sources import build_task

# What does not depend on the checkpoint, the data or the device. The learning rate is about a
# fifth of those that such models are trained with, so that they keep what they have learned.
SETTINGS: dict[str, Any] = {
    "max_steps": 1000,
    "warmup_steps": 50,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "min_lr_rate": 0.1,
    "weight_decay": 0.1,
    "per_device_train_batch_size": 4,
    "eval_steps": 100,
    "eval_samples": 8,
    "per_device_eval_batch_size": 4,
    "save_steps": 100,
    "load_best_model_at_end": True,
    "logging_steps": 10,
}
# The key of the batch size, which by default fits the number of documents.
ROWS = "per_device_train_batch_size"
# Overrides that contradict an argument or option of the command, and which one.
CONTRADICTING = {
    "task": "--data",
    "task.part": "--data",
    "task.data": "--data",
    "init_from": "CHECKPOINT",
    "initial_state": "--initial-state",
    "initial_state.kind": "--initial-state",
    "length": "--length",
    "length.max": "--length",
    "output_dir": "--output",
}
# Validation rows of prompts and answers, which have much fewer scored tokens than rows of text.
ANSWERS = 64
# With a carried state: segments through which the gradient of a step flows.
SEGMENTS = 4
# Overrides that name validation data; others change how the default data is read.
OWN_VALIDATION = {
    "validation",
    *(f"validation.{key}" for key in ("kind", "data", "files", "corpus")),
}


def finetuning(
    checkpoint: str,
    data: Sequence[str],
    *,
    length: int,
    initial_state: str = "carry",
    validation: Sequence[str] = (),
    output_dir: str | None = None,
    overrides: Sequence[str] = (),
) -> TrainConfig:
    """Returns the configuration of a run that fine-tunes a checkpoint.

    Args:
        checkpoint: as `longrnn.load` takes it.
        data: what `task.data` takes.
        length: tokens of a row, or of a segment where a state is carried.
        initial_state: a kind of `longrnn.training.initial_states`.
        validation: held-out data, as `data`; by default a part of `data` is held out.
        output_dir: by default `runs/NAME-finetuned`.
        overrides: `key=value`, which go before all other settings.

    Raises:
        UserError: an invalid value.
    """
    keys = [override.partition("=")[0] for override in overrides]
    _refuse_contradicting(keys)
    on_gpu = torch.cuda.is_available()
    steps = _steps(overrides)
    often = min(SETTINGS["eval_steps"], max(1, steps // 5))
    task: dict[str, Any] = {"kind": "text", "data": _one_or_all(data)}
    values = {
        **SETTINGS,
        "output_dir": output_dir or f"runs/{Path(split_spec(checkpoint)[0]).name}-finetuned",
        "init_from": checkpoint,
        "max_steps": steps,
        "warmup_steps": min(SETTINGS["warmup_steps"], steps // 10),
        "eval_steps": often,
        "save_steps": often,
        "task": task,
        "length": {"max": length},
        "initial_state": {"kind": initial_state},
        "mixed_precision": "bf16" if on_gpu else "no",
        "gradient_checkpointing": "block" if on_gpu else "no",
    }
    if {"lr_scheduler_type", "min_lr"} & set(keys):
        del values["min_lr_rate"]  # which applies to the default schedule alone
    if uses_streams(values["initial_state"]):
        values["segments_per_step"] = SEGMENTS
    held_out = _held_out(task, validation, overrides)
    if held_out is not None:
        values["validation"] = held_out
        # The options of the task are those of the validation too.
        same = [f"validation{one[4:]}" for one in overrides if one.startswith("task.")]
        overrides = [*same, *overrides]
    config = build_config(TrainConfig, values, overrides, source="longrnn finetune")
    if config.task["kind"] == "instruct" and "eval_samples" not in keys:
        config.eval_samples = ANSWERS
    return config


def fitting_rows(config: TrainConfig, processes: int, *, quiet: bool = True) -> int:
    """Returns the batch size per process: that of `config`, or less where documents are few.

    Args:
        config: of `finetuning`.
        processes: of the run.
        quiet: print no progress where data is tokenized.

    Raises:
        UserError: the data cannot be read.
    """
    name, tokenizer = models.tokenizer_of(config)
    task = build_task(config.task, tokenizer, name=name, quiet=quiet)
    most = Source(task, config, 0, processes).most_rows()
    rows = config.per_device_train_batch_size
    return rows if most is None else max(1, min(rows, most))


def _refuse_contradicting(keys: Sequence[str]) -> None:
    """Refuses overrides of what the command has an option for."""
    for key in keys:
        if key in CONTRADICTING:
            raise UserError(
                f"{key} is set by {CONTRADICTING[key]}: give its value there, or use `longrnn "
                "train` with a configuration"
            )


def _held_out(
    task: dict[str, Any], validation: Sequence[str], overrides: Sequence[str]
) -> dict[str, Any] | None:
    """Returns the validation data of a run, and leaves it out of `task`; None if it is given."""
    if {one.partition("=")[0] for one in overrides} & OWN_VALIDATION:
        return None
    if validation:
        return {**task, "data": _one_or_all(validation)}
    task["part"] = TRAINING
    return {**task, "part": HELD_OUT}


def _steps(overrides: Sequence[str]) -> int:
    """The steps of a run, from which the intervals follow."""
    given = [one.partition("=")[2] for one in overrides if one.startswith("max_steps=")]
    return int(given[-1]) if given and given[-1].isdecimal() else int(SETTINGS["max_steps"])


def _one_or_all(data: Sequence[str]) -> Any:
    return data[0] if len(data) == 1 else list(data)
