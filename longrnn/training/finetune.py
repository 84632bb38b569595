"""The recipe of `longrnn finetune`: `configs/train/finetune.yaml`, for a checkpoint and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from longrnn.config import load_config
from longrnn.options import Options, Tokens
from longrnn.text import Documents

if TYPE_CHECKING:
    from longrnn.training.config import TrainConfig

# The configuration, also by its name for `longrnn train`.
RECIPE = "finetune"


class Recipe(Options):
    """What the configuration of a run that fine-tunes a checkpoint is made of."""

    data: list[Documents] = Field([])
    """Documents to train on: a folder, file, dataset or corpus; may be given several times."""
    length: Tokens = 4096
    """Tokens of a row, or of a segment of a carried state."""
    initial_state: str = "carry"
    """What rows start from: carry, pass, fitted_noise, random_noise, learned or zero."""
    validation: list[Documents] = Field([])
    """Held-out documents, as for --data (default: documents with 5 % of the tokens of --data)."""
    output: str | None = None
    """Folder of the run (default: runs/CHECKPOINT-finetuned)."""

    def config(self, checkpoint: str, overrides: Sequence[str] = ()) -> TrainConfig:
        """The configuration of a run.

        Args:
            checkpoint: as `longrnn.load` takes it.
            overrides: `key=value`, which go before all other settings.

        Raises:
            UserError: an invalid value.
        """
        import torch

        from longrnn.checkpoints.names import split_spec
        from longrnn.training.config import configured

        name = Path(split_spec(checkpoint)[0]).absolute().name
        kind = "instruct" if "task.kind=instruct" in overrides else "text"
        task: dict[str, Any] = {"kind": kind, "data": self.data}
        values = load_config(RECIPE) | {
            "output_dir": self.output or f"runs/{name}-finetuned",
            "init_from": checkpoint,
            "task": task,
            "length": {"max": self.length},
        }
        if self.validation:
            values["validation"] = {**task, "data": self.validation}
        if torch.cuda.is_available():
            values |= {"mixed_precision": "bf16", "gradient_checkpointing": "block"}
        # As an override, it drops the options that another state does not have.
        state = f"initial_state.kind={self.initial_state}"
        config = configured(values, [state, *overrides], source="longrnn finetune")
        given = {override.partition("=")[0] for override in overrides}
        for key in {"eval_steps", "save_steps"} - given:
            setattr(config, key, min(getattr(config, key), max(1, config.max_steps // 5)))
        return config
