"""`longrnn eval harness`."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import Model, pick_device
from longrnn.errors import UserError
from longrnn.options import Options

# Options that are not declared here are words of the argument for lm-eval.
SETTINGS = {"ignore_unknown_options": True}


class Tasks(Options):
    """What `longrnn eval harness` reads itself; lm-eval reads all other options."""

    options: Annotated[list[str], Argument("LM-EVAL OPTION")] = Field([])
    """Options of `lm-eval run`."""
    trust_task_code: bool = False
    """Allow lm-eval task files of your own, which can run any Python code."""


def harness(model: Model, tasks: Tasks) -> None:
    """Evaluate a checkpoint on lm-eval tasks, with the options of lm-eval.

    The checkpoint comes first; the options after it go to `lm-eval run`, whose help lists them all:
    --tasks, --include_path, --num_fewshot, --limit, --output_path, --log_samples, --metadata,
    --gen_kwargs, --batch_size, --seed, and --use_cache, which lets an interrupted run resume.
    --model_args takes max_length, tokenizer, prefix_token_id and add_bos_token.
    This package adds the task longrnn_passkey.

    Example: longrnn eval harness passkey-tiny --tasks longrnn_passkey
    --metadata '{"max_seq_lengths": [1024, 4096]}' --limit 20
    """
    if model.checkpoint.startswith("-"):
        raise UserError("give the checkpoint before lm-eval's options: longrnn eval harness NAME …")
    try:
        from longrnn.evaluation.harness import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise UserError("lm-eval is not installed: pip install lm-eval") from error

    checkpoint = "+".join(filter(None, (model.checkpoint, model.mitigation)))
    given = json.dumps({"pretrained": checkpoint})
    ours = ["--model_args", given, "--device", pick_device(model.device), "--batch_size", "auto"]
    run([*ours, *tasks.options, "--model", "longrnn"], trust_task_code=tasks.trust_task_code)
