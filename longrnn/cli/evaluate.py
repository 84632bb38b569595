"""`longrnn eval …` and `longrnn compare`, which measure in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from longrnn.cli.options import Models, Output, pick_device, results_folder
from longrnn.evaluation import options
from longrnn.options import Options
from longrnn.processes import is_main, start

if TYPE_CHECKING:
    from longrnn.evaluation.base import Evaluation
    from longrnn.hf.opened import OpenCheckpoint

KINDS: dict[str, type[Options]] = {
    "passkey": options.PasskeyOptions,
    "perplexity": options.PerplexityOptions,
    "task": options.SequenceOptions,
    "reverse": options.SequenceOptions,
    "memory": options.MemoryOptions,
}


class Suites(Options):
    """What `longrnn compare` measures."""

    suites: list[str] = Field(["quick"])
    """Name of a bundled suite, or a YAML file; may be given several times."""


def command_of(kind: str) -> Callable[..., None]:
    """Return the command of one kind of evaluation; `reverse` is `task --task reverse`."""

    def run(models: Models, evaluation: Any, output: Output) -> None:
        from longrnn.evaluation.suites import build_evaluation

        start()
        given = evaluation.model_dump(exclude_unset=True)
        _measure(kind, models, [build_evaluation({"kind": kind, **given})], output)

    run.__doc__ = KINDS[kind].__doc__
    run.__annotations__["evaluation"] = KINDS[kind]
    return run


def compare(models: Models, suites: Suites, output: Output) -> None:
    """Compare models on the same prompts and texts, and measure what each costs.

    Writes report.html, one picture per metric, and cells.json. The same command resumes an
    interrupted comparison; models, lengths and prompts may be added.

    Example: longrnn compare passkey-tiny 'passkey-tiny-short+forget_more' --suite quick
    """
    from longrnn.evaluation.suites import read_suite

    start()
    read = [(Path(name).stem, read_suite(name)) for name in dict.fromkeys(suites.suites)]
    for name, own in read if len(read) > 1 else ():
        for evaluation in own:
            evaluation.name = f"{name} {evaluation.title}"
    _measure("compare", models, [one for _, own in read for one in own], output)


def _measure(name: str, models: Models, evaluations: Sequence[Evaluation], output: Output) -> None:
    from longrnn.hf.opened import open_checkpoint

    device, names = pick_device(models.device), models.checkpoints
    opened = [open_checkpoint(one, models.mitigation, device=device) for one in names]
    folder = output.output or results_folder(name, names, models.mitigation)
    measure(opened, evaluations, folder)


def measure(
    models: Sequence[OpenCheckpoint], evaluations: Sequence[Evaluation], folder: Path
) -> None:
    """Measure what is missing in a folder, print the tables, and write the report."""
    from longrnn.evaluation.report import show, write_report
    from longrnn.evaluation.run import run

    outcomes = run(models, evaluations, folder)
    if is_main():
        written = write_report(outcomes, folder)
        for outcome in outcomes:
            show(outcome)
        typer.echo("\n".join(map(str, written)))
