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
    harness,
    info,
    launch,
    report,
    train,
)
from longrnn.cli.command import command, invoke
from longrnn.programs import run_to_continue, run_to_end

app = typer.Typer(
    help="Recurrent and state-space language models on contexts far beyond their training length.",
    epilog="Example: longrnn eval passkey passkey-tiny --lengths 1k,4k",
    add_completion=False,
)


def _group(name: str, about: str, example: str) -> typer.Typer:
    group = typer.Typer(help=about, epilog=f"Example: longrnn {example}")
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
_diagnose = _group("diagnose", "Look inside a model.", "diagnose states collapse-tiny --newlines")
command(_diagnose, "states")(diagnose.states)
evaluate.enter(_diagnose, "memory")
command(_diagnose, "gradients")(diagnose.gradients)
command(app, "calibrate")(calibrate.calibrate)
command(app, "generate")(generate.generate)
command(app, "convert")(convert.convert)
command(app, "info")(info.info)
command(app, "doctor")(doctor.doctor)
command(app, "report")(report.report)
_data = _group("data", "Build corpora to train on.", "data build --out data/books book1.txt")
command(_data, "build")(data.build)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from longrnn import __version__

        typer.echo(f"longrnn {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, help="Print the version and exit."
    ),
) -> None:
    pass


def run() -> NoReturn:
    """Run the command line; bad input prints one message to standard error and exits with 2."""
    run_to_end(lambda: invoke(app, sys.argv[1:] or ["--help"]), again=_again)


def _again() -> str:
    """Return the command that continues this one after an interruption."""
    arguments, run = sys.argv[1:], run_to_continue()
    if run is not None and "--grid" not in arguments:
        arguments = [arguments[0], "--resume", str(run)]
    # The options of `accelerate launch` itself are not visible from inside the process.
    start = "accelerate launch … -m longrnn.cli" if "WORLD_SIZE" in os.environ else "longrnn"
    if "LONGRNN_LAUNCH" in os.environ:  # by `longrnn launch`
        start = f"longrnn launch {os.environ['LONGRNN_LAUNCH']}".rstrip()
    return f"{start} {shlex.join(arguments)}"
