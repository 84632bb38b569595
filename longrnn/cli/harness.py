"""`longrnn eval harness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import Model, Quiet, pick_device
from longrnn.errors import UserError

# Options that are not declared here are words of the argument for lm-eval.
SETTINGS = {"ignore_unknown_options": True}


class Tasks(Quiet):
    """What `longrnn eval harness` reads itself; lm-eval reads all other options."""

    options: Annotated[list[str], Argument("LM-EVAL OPTION")] = Field([])
    """Options of `lm-eval run`."""
    datasets: Path | None = None
    """Folder with data sets: ORGANISATION/NAME in it is read, not the Hub."""
    trust_task_code: bool = False
    """Allow lm-eval task files of your own, which can run any Python code."""


def harness(model: Model, tasks: Tasks) -> None:
    """Evaluate a checkpoint on lm-eval tasks, with the options of lm-eval.

    The checkpoint comes first; the options after it go to `lm-eval run`, whose help lists them all:
    --tasks, --include_path, --num_fewshot, --limit, --output_path, --log_samples, --metadata,
    --gen_kwargs, --batch_size, --seed, and --use_cache, which lets an interrupted run resume.
    --model_args takes dtype, max_length, tokenizer, prefix_token_id, add_bos_token and backend.
    This package adds the tasks longrnn_passkey and longrnn_reverse.

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

    options: dict[str, object] = {
        "device": pick_device(model.device),
        "quiet": tasks.quiet,
    }
    if model.mitigation is not None:
        options["mitigation"] = model.mitigation
    run(
        model.checkpoint,
        tasks.options,
        options,
        datasets=tasks.datasets,
        trust_task_code=tasks.trust_task_code,
    )
