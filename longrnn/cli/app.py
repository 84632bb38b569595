"""The typer app with all commands; `longrnn.programs` turns errors into messages and exit codes."""

import os
import shlex
import sys
from typing import NoReturn

import typer

from longrnn.cli import checkpoints, diagnose, doctor, evaluate, report, train
from longrnn.cli.command import Group, enter, invoke
from longrnn.console import say
from longrnn.evaluation.options import EVALUATIONS
from longrnn.imports import import_given, import_options
from longrnn.processes import LAUNCH
from longrnn.programs import run_to_end
from longrnn.progress import QUIET

app = typer.Typer(
    cls=Group,
    help="Recurrent and state-space language models on contexts far beyond their training length.",
    epilog="Example: longrnn eval passkey passkey-tiny --lengths 1k,4k",
    add_completion=False,
    rich_markup_mode="markdown",
)


def _group(name: str, about: str, example: str) -> typer.Typer:
    group = typer.Typer(cls=Group, help=about, epilog=f"Example: longrnn {example}")
    app.add_typer(group, name=name)
    return group


enter(app, "train", train.train)
enter(app, "finetune", train.finetune)
enter(app, "linearize", train.linearize)
enter(app, "launch", train.launch, context_settings=train.LAUNCH_SETTINGS)
ABOUT = "Evaluate checkpoints; the same command resumes, and adds lengths or prompts."
_eval = _group("eval", ABOUT, "eval passkey passkey-tiny --lengths 1k,4k")


def _enter_evaluations() -> None:
    """Enter a command for each kind of evaluation that has none."""
    entered = {command.name for command in _eval.registered_commands}
    for kind in [kind for kind, options in EVALUATIONS.items() if options.group == "eval"]:
        if kind not in entered:
            enter(_eval, kind, evaluate.command_of(kind))


_enter_evaluations()
enter(_eval, "harness", evaluate.harness, context_settings=evaluate.HARNESS_SETTINGS)
enter(app, "compare", evaluate.compare)
_diagnose = _group("diagnose", "Look inside a model.", "diagnose states collapse-tiny --newlines")
enter(_diagnose, "states", diagnose.states)
enter(_diagnose, "memory", evaluate.command_of("memory"))
enter(_diagnose, "gradients", diagnose.gradients)
enter(app, "calibrate", diagnose.calibrate)
enter(app, "repair", diagnose.repair)
enter(app, "generate", checkpoints.generate)
enter(app, "convert", checkpoints.convert)
enter(app, "info", checkpoints.info)
enter(app, "doctor", doctor.doctor)
enter(app, "report", report.report)
_data = _group("data", "Build corpora to train on.", "data build --out data/books book1.txt")
enter(_data, "build", checkpoints.build)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from longrnn import __version__

        say(f"longrnn {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, help="Print the version and exit."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    if quiet:
        os.environ[QUIET] = "1"


def run() -> NoReturn:
    """Run the command line; bad input prints one message to standard error and exits with 2."""
    train.CURRENT.clear()
    run_to_end(_begin, again=_again)


def _begin() -> None:
    words = import_given(sys.argv[1:])
    _enter_evaluations()  # of the imported modules
    invoke(app, words or ["--help"])


def _again() -> str:
    """Return the command that continues after an interruption."""
    words = sys.argv[1:]
    quiet = words[:1] == ["--quiet"]
    for folder, continuation in train.CURRENT.items():
        # `Path.is_file` raises for a name that is too long for a file.
        if os.path.isfile(folder / "train.yaml"):
            words = [*words[:quiet], *continuation, *import_options()]
    if LAUNCH in os.environ:  # by `longrnn launch`
        words = [*shlex.split(os.environ[LAUNCH]), *words]
    return f"longrnn {shlex.join(words)}"
