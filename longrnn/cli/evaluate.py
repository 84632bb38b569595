"""`longrnn eval …` and `longrnn compare`, which measure in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from longrnn.cli.command import command
from longrnn.cli.options import Models, Output, pick_placement
from longrnn.cli.results_folders import results_folder
from longrnn.errors import UserError
from longrnn.evaluation.options import (
    MemoryOptions,
    PasskeyOptions,
    PerplexityOptions,
    SequenceOptions,
)
from longrnn.options import Options
from longrnn.processes import is_main, start

if TYPE_CHECKING:
    from longrnn.evaluation.base import Evaluation
    from longrnn.evaluation.suites import Suite
    from longrnn.hf.opened import OpenCheckpoint

# The options of each kind of evaluation, and an example.
KINDS: dict[str, tuple[type[Options], str]] = {
    "passkey": (
        PasskeyOptions,
        "eval passkey passkey-tiny 'passkey-tiny+forget_more' --lengths 1k,16k --n 20",
    ),
    "perplexity": (
        PerplexityOptions,
        "eval perplexity passkey-tiny --text book.txt --lengths 1k,64k",
    ),
    "task": (SequenceOptions, "eval task runs/sort --lengths 16"),
    "reverse": (SequenceOptions, "eval reverse runs/reverse-small --lengths 16"),
    "memory": (
        MemoryOptions,
        "diagnose memory passkey-tiny --text book.txt --positions 1k,4k,16k",
    ),
}


class Suites(Options):
    """What `longrnn compare` measures."""

    suites: list[str] = Field(["quick"])
    """Name of a bundled suite, or a YAML file; may be given several times."""
    trust_task_code: bool = False
    """Allow lm-eval task files of your own, which can run any Python code."""


def enter(app: typer.Typer, kind: str) -> None:
    """Enter the command of one kind of evaluation; `reverse` is `task --task reverse`."""
    options, example = KINDS[kind]

    def run(models: Models, evaluation: Any, output: Output) -> None:
        from longrnn.evaluation.suites import build_evaluation

        start()
        given = evaluation.model_dump(exclude_unset=True)
        _measure(kind, models, [build_evaluation({"kind": kind, **given})], output)

    run.__doc__ = (
        f"{cleandoc(options.__doc__ or '')}\n\nPrints a table, and writes it as report.html with "
        "pictures and cells.json. The same command resumes an interrupted run; more models, "
        f"lengths, texts or prompts add to the results.\n\nExample: longrnn {example}\n"
    )
    is_alias = kind == "reverse"
    command(app, kind, hidden=is_alias, models=Models, evaluation=options, output=Output)(run)


def compare(models: Models, suites: Suites, output: Output) -> None:
    """Compare models on the same prompts and texts, and measure what each costs.

    Writes report.html, one picture per metric, and cells.json. The same command resumes an
    interrupted comparison; models, lengths and prompts may be added.

    Example: longrnn compare passkey-tiny 'passkey-tiny-short+forget_more' --suite quick
    """
    from longrnn.evaluation.suites import read_suite

    start()
    # A shell expands `--suite eval/suites/*.yaml`; the files after the first become arguments.
    files = [name for name in models.checkpoints if _is_suite(name)]
    models.checkpoints = [name for name in models.checkpoints if name not in files]
    if not models.checkpoints:
        raise UserError("give the checkpoints to compare: longrnn compare A B --suite quick")
    named = suites.suites if "suites" in suites.model_fields_set or not files else []
    read = [read_suite(name) for name in dict.fromkeys([*named, *files])]
    _measure("compare", models, _evaluations(read), output, suites.trust_task_code)


def compare_and_report(
    models: Sequence[OpenCheckpoint],
    suites: Sequence[Suite],
    folder: Path,
    *,
    trust_task_code: bool = False,
    quiet: bool = False,
) -> None:
    """Compare models, print the tables, and write the report; resume what is in the folder."""
    _report(models, _evaluations(suites), folder, trust_task_code, quiet)


def _measure(
    name: str,
    models: Models,
    evaluations: Sequence[Evaluation],
    output: Output,
    trust_task_code: bool = False,
) -> None:
    from longrnn.hf.opened import open_checkpoint

    device, variants = pick_placement(models.device), list(dict.fromkeys(models.checkpoints))
    opened = [
        open_checkpoint(variant, models.mitigation, name=label, device=device)
        for variant, label in _labels(variants, models.mitigation).items()
    ]
    folder = output.output or results_folder(name, variants, models.mitigation)
    _report(opened, evaluations, folder, trust_task_code, output.quiet)


def _report(
    models: Sequence[OpenCheckpoint],
    evaluations: Sequence[Evaluation],
    folder: Path,
    trust_task_code: bool,
    quiet: bool,
) -> None:
    from longrnn.evaluation.report import show, write_report
    from longrnn.evaluation.run import run

    outcomes = run(models, evaluations, folder, trust_task_code=trust_task_code, quiet=quiet)
    if not is_main():
        return
    written = write_report(outcomes, folder)
    for outcome in outcomes:
        show(outcome)
    typer.echo("\n".join(map(str, written)))


def _evaluations(suites: Sequence[Suite]) -> list[Evaluation]:
    """Return the evaluations of suites, with the suite in their titles if there are several."""
    found = []
    for suite in suites:
        for evaluation in suite.evaluations:
            if len(suites) > 1:
                evaluation.name = f"{suite.name} {evaluation.title}"
            found.append(evaluation)
    return found


def _is_suite(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _labels(variants: Sequence[str], mitigation: str | None) -> dict[str, str]:
    """Return a short name for each variant: without parent folders if the names then differ."""
    from longrnn.hf.names import split_spec

    short = {}
    for variant in variants:
        path, own = split_spec(variant)
        short[variant] = "+".join(filter(None, (Path(path).name, own, mitigation)))
    taken = list(short.values())
    return {
        variant: name if taken.count(name) == 1 else "+".join(filter(None, (variant, mitigation)))
        for variant, name in short.items()
    }
