"""`longrnn eval harness`."""

from __future__ import annotations

import typer

from longrnn.cli.options import Checkpoint, Device, Mitigation, Quiet, pick_device
from longrnn.errors import UserError

# Everything that typer does not know goes to lm-eval.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def harness(
    context: typer.Context,
    checkpoint: Checkpoint,
    mitigation: Mitigation = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure a checkpoint on tasks of lm-eval, with lm-eval's own options.

    The checkpoint comes first; what follows goes to `lm-eval run`, whose help lists everything:
    --tasks, --include_path, --num_fewshot, --limit, --output_path, --log_samples, --metadata,
    --gen_kwargs, --batch_size, --seed, and --use_cache, with which an interrupted run goes on.
    --model_args takes dtype, max_length, tokenizer, prefix_token_id, add_bos_token and backend.
    The tasks of this package are longrnn_passkey, longrnn_reverse, longrnn_perplexity, and
    longrnn_needles with its members.

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
        raise UserError("lm-eval is not installed: pip install 'longrnn[harness]'") from error

    options: dict[str, object] = {"device": pick_device(device), "quiet": quiet}
    if mitigation is not None:
        options["mitigation"] = mitigation
    run(checkpoint, context.args, options)
