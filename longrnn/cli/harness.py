"""`longrnn eval harness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import (
    Checkpoint,
    Device,
    Mitigation,
    Quiet,
    TrustTaskCode,
    pick_placement,
)
from longrnn.errors import UserError

# Options that typer does not know are passed on to lm-eval.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def harness(
    context: typer.Context,
    checkpoint: Checkpoint,
    mitigation: Mitigation = None,
    datasets: Annotated[
        Path | None,
        typer.Option(
            help="Folder with data sets: ORGANISATION/NAME in it is read instead of the Hub."
        ),
    ] = None,
    trust_task_code: TrustTaskCode = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Evaluate a checkpoint on lm-eval tasks, with the options of lm-eval.

    The checkpoint comes first; the options after it go to `lm-eval run`, whose help lists them all:
    --tasks, --include_path, --num_fewshot, --limit, --output_path, --log_samples, --metadata,
    --gen_kwargs, --batch_size, --seed, and --use_cache, which lets an interrupted run resume.
    --model_args takes dtype, max_length, tokenizer, prefix_token_id, add_bos_token and backend.
    This package adds the tasks longrnn_passkey, longrnn_reverse, longrnn_perplexity, and the group
    longrnn_needles.

    Example: longrnn eval harness passkey-tiny --tasks longrnn_passkey
    --metadata '{"max_seq_lengths": [1024, 4096]}' --limit 20
    """
    if checkpoint.startswith("-"):
        raise UserError("give the checkpoint before lm-eval's options: longrnn eval harness NAME …")
    try:
        from longrnn.evaluation.harness import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise UserError("lm-eval is not installed: pip install lm-eval") from error

    options: dict[str, object] = {"device": pick_placement(device), "quiet": quiet}
    if mitigation is not None:
        options["mitigation"] = mitigation
    run(checkpoint, context.args, options, datasets=datasets, trust_task_code=trust_task_code)
