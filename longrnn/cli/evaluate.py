"""`longrnn eval …` and `longrnn compare`, which measure in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from longrnn.cli.options import Models, Output, pick_device
from longrnn.evaluation.options import EVALUATIONS
from longrnn.options import Options
from longrnn.processes import start

if TYPE_CHECKING:
    from longrnn.evaluation.base import Evaluation
    from longrnn.hf.opened import OpenCheckpoint


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

    Writes report.html, one picture per metric, and cells.json. The same command resumes an
    interrupted comparison; with the same --output, models, lengths and prompts may be added.

    Example: longrnn compare passkey-tiny 'passkey-tiny-short+forget_more' --suite quick
    """
    from longrnn.evaluation.suites import read_suite

    start()
    names = list(dict.fromkeys(suites.suites))
    evaluations = []
    for name in names:
        for evaluation in read_suite(name):
            if len(names) > 1:
                evaluation.options.name = f"{Path(name).stem} {evaluation.title}"
            evaluations.append(evaluation)
    variant = "" if names == ["quick"] else "-".join(Path(name).stem for name in names)
    evaluate("compare", models, evaluations, output, variant)


def evaluate(
    command: str,
    models: Models,
    evaluations: Sequence[Evaluation[Any]],
    output: Output,
    variant: str,
) -> None:
    """Measure models in the folder of a command, whose default name has the variant."""
    from longrnn.hf.opened import open_checkpoint

    names, mitigation = models.checkpoints, models.mitigation
    folder = output.folder(command, names, mitigation, variant)
    device = pick_device(models.device)
    opened = [open_checkpoint(name, mitigation, device=device) for name in names]
    measure_and_show(opened, evaluations, folder)


def measure_and_show(
    models: Sequence[OpenCheckpoint], evaluations: Sequence[Evaluation[Any]], folder: Path
) -> None:
    """Measure what is missing in a folder, write the report, and print the tables."""
    from longrnn.evaluation.run import run_and_report

    outcomes, files = run_and_report(models, evaluations, folder)
    if files:
        for outcome in outcomes:
            outcome.table.show()
        typer.echo("\n".join(map(str, files)))
