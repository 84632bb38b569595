"""The recipe of `longrnn finetune`: `configs/train/finetune.yaml`, for a checkpoint and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longrnn.checkpoints.names import split_spec
from longrnn.config import load_config
from longrnn.training.config import TrainConfig, configured

# The configuration, also by its name for `longrnn train`.
RECIPE = "finetune"


def finetuning(
    checkpoint: str,
    data: Sequence[str],
    *,
    length: int,
    initial_state: str = "carry",
    validation: Sequence[str] = (),
    output: str | None = None,
    overrides: Sequence[str] = (),
) -> TrainConfig:
    """The configuration of a run that fine-tunes a checkpoint.

    Args:
        checkpoint: as `longrnn.load` takes it.
        data: what `task.data` takes.
        length: tokens of a row, or of a segment where a state is carried.
        initial_state: a kind of `longrnn.training.initial_states`.
        validation: held-out data, as `data`; by default a part of `data` is held out.
        output: folder of the run, by default `runs/NAME-finetuned`.
        overrides: `key=value`, which go before all other settings.

    Raises:
        UserError: an invalid value, or data that cannot be read.
    """
    values = load_config(RECIPE)
    given = {override.partition("=")[0] for override in overrides}
    kind = "instruct" if "task.kind=instruct" in overrides else "text"
    task: dict[str, Any] = {"kind": kind, "data": list(data)}
    values |= {
        "output_dir": output or f"runs/{Path(split_spec(checkpoint)[0]).absolute().name}-finetuned",
        "init_from": checkpoint,
        "task": task,
        "length": {"max": length},
    }
    if validation:
        values["validation"] = {**task, "data": list(validation)}
    if torch.cuda.is_available():
        values |= {"mixed_precision": "bf16", "gradient_checkpointing": "block"}
    # As an override, it drops the options that another state does not have.
    overrides = [f"initial_state.kind={initial_state}", *overrides]
    config = configured(values, overrides, source="longrnn finetune")
    for key in {"eval_steps", "save_steps"} - given:
        setattr(config, key, min(getattr(config, key), max(1, config.max_steps // 5)))
    return config
