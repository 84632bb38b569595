"""`longrnn eval …` and `longrnn compare`, which measure in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import Model, Models, Output, pick_device
from longrnn.console import say
from longrnn.errors import UserError
from longrnn.evaluation.options import EVALUATIONS, HarnessOptions, LongTasks
from longrnn.options import Options
from longrnn.processes import start

if TYPE_CHECKING:
    from longrnn.checkpoints.opened import OpenCheckpoint
    from longrnn.evaluation.base import Evaluation

# Keys that a window of attention with sinks keeps in a comparison, and the sinks among them.
KEYS, SINKS = 2048, 4
# Options that are not declared here are words of the argument for lm-eval.
HARNESS_SETTINGS = {"ignore_unknown_options": True}
# Options of lm-eval that an evaluation by length has.
BY_LENGTH = ("tasks", "include_path", "num_fewshot", "limit", "gen_kwargs", "batch_size")


class Suites(Options):
    """What `longrnn compare` measures."""

    suites: list[str] = Field(["quick"])
    """Name of a bundled suite, or a YAML file; may be given several times."""


def command_of(kind: str) -> Callable[..., None]:
    """Return the command of one kind of evaluation."""
    options_class = EVALUATIONS[kind]

    def run(models: Models, options: Any, output: Output) -> None:
        start()
        evaluate(kind, models, [options.evaluation()], output, options.variant())

    run.__doc__ = options_class.__doc__
    run.__annotations__["options"] = options_class
    return run


def compare(models: Models, suites: Suites, output: Output) -> None:
    """Compare models on the same prompts and texts, and measure what each costs.

    A Hugging Face model whose maximum length is below the longest one is measured once more with
    attention_window(window=2044, sinks=4), or less if it is shorter. Writes report.html, one
    picture per metric, and cells.json. The same command resumes an interrupted comparison; with
    the same --output, models, lengths and prompts may be added.

    Example: longrnn compare passkey-tiny 'passkey-tiny-short+forget_more' --suite quick
    """
    from longrnn.evaluation.run import read_suite

    start()
    names = list(dict.fromkeys(suites.suites))
    evaluations = []
    for name in names:
        for evaluation in read_suite(name):
            if len(names) > 1:
                evaluation.options.name = f"{Path(name).stem} {evaluation.title}"
            evaluations.append(evaluation)
    variant = "" if names == ["quick"] else "-".join(Path(name).stem for name in names)
    evaluate("compare", models, evaluations, output, variant, with_windows)


def evaluate(
    command: str,
    models: Models,
    evaluations: Sequence[Evaluation[Any]],
    output: Output,
    variant: str,
    complete: Callable[..., list[OpenCheckpoint]] | None = None,
) -> None:
    """Measure models in the folder of a command, whose default name has the variant.

    Args:
        command: its name.
        models: the models.
        evaluations: what is measured.
        output: of the command.
        variant: for the name of the folder.
        complete: returns all models from those given and the evaluations; None for those given.
    """
    from longrnn.checkpoints.opened import open_checkpoint

    names = [models.under(name) for name in models.checkpoints]
    folder, device = output.folder(command, names, variant), pick_device(models.device)
    opened = [open_checkpoint(name, device=device) for name in names]
    measure_and_show(complete(opened, evaluations) if complete else opened, evaluations, folder)


def with_windows(
    models: Sequence[OpenCheckpoint], evaluations: Sequence[Evaluation[Any]]
) -> list[OpenCheckpoint]:
    """Return models, and those that end before the longest length under a window, too.

    A model whose attention cannot have a window is reported.
    """
    from longrnn.mitigations.spec import ATTENTION_WINDOW

    lengths = [getattr(evaluation.options, "lengths", None) or [0] for evaluation in evaluations]
    longest, complete = max(map(max, lengths)), {model.name: model for model in models}
    for opened in models:
        plain: Any = opened.model
        limit = plain.max_length
        if limit is None or limit >= longest or not hasattr(plain, "with_attention_window"):
            continue
        size = min(KEYS, limit) - SINKS
        window = f"{ATTENTION_WINDOW}(window={size}, sinks={SINKS})"
        try:
            model = plain.with_attention_window(size, SINKS)
        except UserError as error:
            say(f"{opened.name} is not measured with a window of attention: {error}")
            continue
        name, source = f"{opened.name}+{window}", opened.source and opened.source.under(window)
        complete.setdefault(name, opened._replace(name=name, model=model, source=source))
    return list(complete.values())


def measure_and_show(
    models: Sequence[OpenCheckpoint], evaluations: Sequence[Evaluation[Any]], folder: Path
) -> None:
    """Measure what is missing in a folder, write the report, and print the tables."""
    from longrnn.evaluation.run import run_and_report

    tables, files = run_and_report(models, evaluations, folder)
    if files:
        for table in tables:
            table.show()
        say(*files)


class Tasks(LongTasks):
    """What `longrnn eval harness` reads itself; lm-eval reads all other options."""

    options: Annotated[list[str], Argument("LM-EVAL OPTION")] = Field([])
    """Options of `lm-eval run`."""


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

    checkpoint = model.under(model.checkpoint)
    given = json.dumps({"pretrained": checkpoint, "chunk_select": tasks.chunk_select})
    ours = ["--model_args", given, "--device", pick_device(model.device), "--batch_size", "auto"]
    run(["--model", "longrnn", *ours, *tasks.options], tasks.data)


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
