"""The typer app with all commands; `longrnn.programs` turns errors into messages and exit codes."""

from __future__ import annotations

import os
import shlex
import sys
from typing import NoReturn

import typer

from longrnn.cli import (
    calibrate,
    convert,
    data,
    diagnose,
    doctor,
    evaluate,
    finetune,
    generate,
    gradients,
    harness,
    info,
    launch,
    report,
    train,
)
from longrnn.cli.command import QUIET, Group, Program, command
from longrnn.files import expand_home
from longrnn.programs import run_to_continue, run_to_end

# Options whose value is a text, not a path.
TEXTS = ("--prompt", "--stop", "--split-on", "--system_instruction")

app = typer.Typer(
    name="longrnn",
    cls=Program,
    help="Recurrent and state-space language models on contexts far beyond their training length.",
    epilog="Example: longrnn eval passkey passkey-tiny --lengths 1k,4k",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _group(name: str, about: str, example: str) -> typer.Typer:
    group = typer.Typer(
        cls=Group, help=about, epilog=f"Example: longrnn {example}", no_args_is_help=True
    )
    app.add_typer(group, name=name)
    return group


command(app, "train")(train.train)
command(app, "finetune")(finetune.finetune)
command(app, "launch", settings=launch.SETTINGS)(launch.launch)
_eval = _group("eval", "Evaluate checkpoints.", "eval passkey passkey-tiny --lengths 1k,4k")
for kind in ("passkey", "perplexity", "task", "reverse"):
    evaluate.enter(_eval, kind)
command(_eval, "harness", settings=harness.SETTINGS)(harness.harness)
command(app, "compare")(evaluate.compare)
_diagnose = _group(
    "diagnose",
    "Look inside a model: states, memory, gradients.",
    "diagnose states passkey-tiny-short --newlines",
)
command(_diagnose, "states")(diagnose.states)
evaluate.enter(_diagnose, "memory")
command(_diagnose, "gradients")(gradients.gradients)
command(app, "calibrate")(calibrate.calibrate)
command(app, "generate")(generate.generate)
command(app, "convert")(convert.convert)
command(app, "info")(info.info)
command(app, "doctor")(doctor.doctor)
command(app, "report")(report.report)
_data = _group("data", "Build corpora to train on.", "data build --out data/books book1.txt")
command(_data, "build")(data.build)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    quiet: bool = typer.Option(
        False, QUIET, help="Show no progress; may stand anywhere in a command."
    ),
) -> None:
    if version:
        from longrnn import __version__

        typer.echo(f"longrnn {__version__}")
        raise typer.Exit()


def run() -> NoReturn:
    """Runs the command line; bad input prints one message to standard error and exits with 2."""
    sys.argv[1:] = map(_with_home, sys.argv, sys.argv[1:])
    run_to_end(lambda: app(prog_name="longrnn"), again=_again)


def _with_home(before: str, word: str) -> str:
    """Expand `~/` of a path in an argument, and in `--option=~/file`, which some shells leave."""
    option, equals, value = word.partition("=")
    if before in TEXTS or option in TEXTS:
        return word
    if equals and option.startswith("--"):
        return f"{option}={expand_home(value)}"
    return expand_home(word)


def _again() -> str:
    """The command that continues this one after an interruption."""
    arguments, run = sys.argv[1:], run_to_continue()
    if run is not None and "--grid" not in arguments:
        arguments = [arguments[0], "--resume", str(run)]
    # The options of `accelerate launch` itself are not visible from inside the process.
    start = "accelerate launch … -m longrnn.cli" if "WORLD_SIZE" in os.environ else "longrnn"
    if "LONGRNN_LAUNCH" in os.environ:  # by `longrnn launch`
        start = f"longrnn launch {os.environ['LONGRNN_LAUNCH']}".rstrip()
    return f"{start} {shlex.join(arguments)}"
