"""`longrnn eval harness`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.evaluate import evaluate
from longrnn.cli.options import Model, Models, Output, pick_device
from longrnn.errors import UserError
from longrnn.evaluation.options import HarnessOptions
from longrnn.options import Lengths, Options, Tokens
from longrnn.processes import start

# Options that are not declared here are words of the argument for lm-eval.
HARNESS_SETTINGS = {"ignore_unknown_options": True}
# Options of lm-eval that an evaluation by length has.
BY_LENGTH = ("tasks", "include_path", "num_fewshot", "limit", "gen_kwargs", "batch_size")


class Tasks(Options):
    """What `longrnn eval harness` reads itself; lm-eval reads all other options."""

    options: Annotated[list[str], Argument("LM-EVAL OPTION")] = Field([])
    """Options of `lm-eval run`."""
    lengths: Lengths | None = None
    """Prompt lengths in tokens, for tasks that make prompts of a length; the results are then a
    table by length and task in --output."""
    data: Path | None = None
    """A folder with the data that tasks would download."""
    chunk_select: Tokens | None = None
    """For tasks that generate: answer from the selected chunk of this many tokens and the last line
    of the prompt."""


def harness(model: Model, tasks: Tasks, output: Output) -> None:
    """Evaluate a checkpoint on lm-eval tasks, with the options of lm-eval.

    The checkpoint comes first; the options after it go to `lm-eval run`, whose help lists them all:
    --tasks, --include_path, --num_fewshot, --limit, --output_path, --log_samples, --metadata,
    --gen_kwargs, --batch_size, --seed, and --use_cache, which lets an interrupted run resume.
    --model_args takes tokenizer, add_bos_token and max_length. This package adds the task
    longrnn_passkey. Task files can contain Python code, which lm-eval runs. With --lengths, the
    results have intervals and are resumed; --tasks, --include_path, --num_fewshot, --limit,
    --gen_kwargs and --batch_size are then the options.

    Example: longrnn eval harness passkey-tiny --tasks longrnn_passkey --limit 10
    """
    if model.checkpoint.startswith("-"):
        raise UserError("give the checkpoint before lm-eval's options: longrnn eval harness NAME …")
    if tasks.lengths is not None:
        _by_length(model, tasks, output)
        return
    if output.output is not None:
        raise UserError("--output belongs to --lengths: give lm-eval's --output_path instead")
    from longrnn.evaluation.harness import run

    checkpoint = "+".join(filter(None, (model.checkpoint, model.mitigation)))
    given = json.dumps({"pretrained": checkpoint, "chunk_select": tasks.chunk_select})
    ours = ["--model_args", given, "--device", pick_device(model.device), "--batch_size", "auto"]
    run([*ours, *tasks.options, "--model", "longrnn"], tasks.data)


def _by_length(model: Model, tasks: Tasks, output: Output) -> None:
    """Measure tasks by length, and show the tables."""
    from longrnn.evaluation.harness.command import parse

    start()
    model_type = ["--model", "longrnn"]
    given, defaults = vars(parse([*model_type, *tasks.options])), vars(parse(model_type))
    changed: dict[str, Any] = {
        name: value for name, value in given.items() if value != defaults.get(name)
    }
    if others := sorted(changed.keys() - BY_LENGTH):
        raise UserError(
            f"--{others[0]} cannot be combined with --lengths: leave one of them out, or use one "
            f"of --{', --'.join(BY_LENGTH)}"
        )
    n = changed.pop("limit", None)
    if n is not None and n % 1:
        raise UserError(f"--limit {n:g} is not a number of documents: give 1 or more")
    options = HarnessOptions(n=n, **changed, **tasks.model_dump(exclude={"options"}))
    models = Models(checkpoints=[model.checkpoint], **model.model_dump(exclude={"checkpoint"}))
    evaluate("harness", models, [options.evaluation()], output, options.variant())
