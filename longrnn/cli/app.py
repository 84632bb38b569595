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
    info,
    launch,
    report,
    train,
)
from longrnn.cli.command import command
from longrnn.files import expand_home
from longrnn.programs import run_to_continue, run_to_end

# Options whose value is a text, not a path.
TEXTS = ("--prompt", "--stop", "--split-on", "--system_instruction")

app = typer.Typer(
    name="longrnn",
    help="Recurrent and state-space language models on contexts far beyond their training length.",
    epilog="Example: longrnn eval passkey passkey-tiny --lengths 1k,4k",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("finetune")(finetune.finetune)
app.command("launch", context_settings=launch.SETTINGS)(launch.launch)
app.add_typer(evaluate.app, name="eval")
command(app, "compare")(evaluate.compare)
app.add_typer(diagnose.app, name="diagnose")
command(app, "calibrate")(calibrate.calibrate)
command(app, "convert")(convert.convert)
command(app, "generate", context_settings=generate.SETTINGS)(generate.generate)
command(app, "info")(info.info)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
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
