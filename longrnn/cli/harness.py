"""`longrnn eval harness`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Annotated

from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import Model, pick_device
from longrnn.errors import UserError
from longrnn.options import Options

# Options that are not declared here are words of the argument for lm-eval.
HARNESS_SETTINGS = {"ignore_unknown_options": True}


class Tasks(Options):
    """What `longrnn eval harness` reads itself; lm-eval reads all other options."""

    options: Annotated[list[str], Argument("LM-EVAL OPTION")] = Field([])
    """Options of `lm-eval run`."""


def harness(model: Model, tasks: Tasks) -> None:
    """Evaluate a checkpoint on lm-eval tasks, with the options of lm-eval.

    The checkpoint comes first; the options after it go to `lm-eval run`, whose help lists them all:
    --tasks, --include_path, --num_fewshot, --limit, --output_path, --log_samples, --metadata,
    --gen_kwargs, --batch_size, --seed, and --use_cache, which lets an interrupted run resume.
    --model_args takes tokenizer, add_bos_token and max_length. This package adds the task
    longrnn_passkey. Task files can contain Python code, which lm-eval runs.

    Example: longrnn eval harness passkey-tiny --tasks longrnn_passkey --limit 10
    """
    if model.checkpoint.startswith("-"):
        raise UserError("give the checkpoint before lm-eval's options: longrnn eval harness NAME …")
    if find_spec("lm_eval") is None:
        raise UserError("lm-eval is not installed: pip install lm-eval")
    from longrnn.evaluation.harness import run

    checkpoint = "+".join(filter(None, (model.checkpoint, model.mitigation)))
    given = json.dumps({"pretrained": checkpoint})
    ours = ["--model_args", given, "--device", pick_device(model.device), "--batch_size", "auto"]
    run([*ours, *tasks.options, "--model", "longrnn"])
