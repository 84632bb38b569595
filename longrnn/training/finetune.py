"""The recipe of `longrnn finetune`: `configs/train/finetune.yaml`, for a checkpoint and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longrnn.config import load_config
from longrnn.data import TASKS, Text
from longrnn.hf.names import split_spec
from longrnn.training.config import TrainConfig, configured
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.models import tokenizer_of

# The configuration, also by its name for `longrnn train`.
RECIPE = "finetune"
# Validation rows of prompts and answers, which have much fewer scored tokens than rows of text.
ANSWERS = 64


def finetuning(
    checkpoint: str,
    data: Sequence[str],
    *,
    length: int,
    initial_state: str = "carry",
    validation: Sequence[str] = (),
    output_dir: str | None = None,
    overrides: Sequence[str] = (),
    processes: int = 1,
) -> TrainConfig:
    """The configuration of a run that fine-tunes a checkpoint.

    Args:
        checkpoint: as `longrnn.load` takes it.
        data: what `task.data` takes.
        length: tokens of a row, or of a segment where a state is carried.
        initial_state: a kind of `longrnn.training.initial_states`.
        validation: held-out data, as `data`; by default a part of `data` is held out.
        output_dir: by default `runs/NAME-finetuned`.
        overrides: `key=value`, which go before all other settings.
        processes: of the run; with little data, each gets smaller batches.

    Raises:
        UserError: an invalid value, or data that cannot be read.
    """
    values = load_config(RECIPE)
    given = {override.partition("=")[0] for override in overrides}
    is_answers = "task.kind=instruct" in overrides
    task: dict[str, Any] = {"kind": "instruct" if is_answers else "text", "data": list(data)}
    values |= {
        "output_dir": output_dir or f"runs/{Path(split_spec(checkpoint)[0]).name}-finetuned",
        "init_from": checkpoint,
        "task": task,
        "length": {"max": length},
        "initial_state": {"kind": initial_state},
    }
    if validation:
        values["validation"] = {**task, "data": list(validation)}
    if not INITIAL_STATES[initial_state].streams:
        del values["segments_per_step"]
    if torch.cuda.is_available():
        values |= {"mixed_precision": "bf16", "gradient_checkpointing": "block"}
    if is_answers:
        values["eval_samples"] = ANSWERS
    config = configured(values, overrides, source="longrnn finetune")
    for key in {"eval_steps", "save_steps"} - given:
        setattr(config, key, min(getattr(config, key), max(1, config.max_steps // 5)))
    if "per_device_train_batch_size" not in given:
        built = TASKS.build(config.task, tokenizer_of(config))
        assert isinstance(built, Text)
        most = built.documents.places // (config.length.max * processes)
        rows = config.per_device_train_batch_size
        config.per_device_train_batch_size = max(1, min(rows, most))
    return config
