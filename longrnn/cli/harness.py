"""`longrnn eval harness`."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import Field

from longrnn.cli.options import Model, pick_placement
from longrnn.errors import UserError
from longrnn.options import Options

# Options that typer does not know are passed on to lm-eval.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


class Tasks(Options):
    """What `longrnn eval harness` reads itself; lm-eval reads all other options."""

    datasets: Path | None = Field(
        default=None,
        description="Folder with data sets: ORGANISATION/NAME in it is read, not the Hub.",
    )
    trust_task_code: bool = Field(
        default=False,
        description="Allow lm-eval task files of your own, which can run any Python code.",
    )
    quiet: bool = Field(default=False, description="Show no progress.")


def harness(context: typer.Context, models: Model, tasks: Tasks) -> None:
    """Evaluate a checkpoint on lm-eval tasks, with the options of lm-eval.

    The checkpoint comes first; the options after it go to `lm-eval run`, whose help lists them all:
    --tasks, --include_path, --num_fewshot, --limit, --output_path, --log_samples, --metadata,
    --gen_kwargs, --batch_size, --seed, and --use_cache, which lets an interrupted run resume.
    --model_args takes dtype, max_length, tokenizer, prefix_token_id, add_bos_token and backend.
    This package adds the tasks longrnn_passkey and longrnn_reverse.

    Example: longrnn eval harness passkey-tiny --tasks longrnn_passkey
    --metadata '{"max_seq_lengths": [1024, 4096]}' --limit 20
    """
    if models.checkpoint.startswith("-"):
        raise UserError("give the checkpoint before lm-eval's options: longrnn eval harness NAME …")
    try:
        from longrnn.evaluation.harness import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise UserError("lm-eval is not installed: pip install lm-eval") from error

    options: dict[str, object] = {
        "device": pick_placement(models.device),
        "quiet": tasks.quiet,
    }
    if models.mitigation is not None:
        options["mitigation"] = models.mitigation
    run(
        models.checkpoint,
        context.args,
        options,
        datasets=tasks.datasets,
        trust_task_code=tasks.trust_task_code,
    )
