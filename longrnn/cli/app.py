"""The commands' tree, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any, NoReturn

import typer

from longrnn.cli import (
    calibrate,
    compare,
    convert,
    data,
    diagnose,
    evaluate,
    generate,
    info,
    replay,
    report,
    sweep,
    train,
)
from longrnn.errors import Terminated, UserError
from longrnn.locks import release_all

# How typer leaves after Ctrl-C.
INTERRUPTED = 130

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
app.command("sweep")(sweep.sweep)
app.command("replay")(replay.replay)
app.add_typer(evaluate.app, name="eval")
app.command("compare")(compare.compare)
app.add_typer(diagnose.app, name="diagnose")
app.command("calibrate")(calibrate.calibrate)
app.command("convert")(convert.convert)
app.command("generate")(generate.generate)
app.command("info")(info.info)
app.command("report")(report.report)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if version:
        from longrnn import __version__

        typer.echo(f"longrnn {__version__}")
        raise typer.Exit()


def run() -> NoReturn:
    """Runs the command line. Bad input leaves one sentence on standard error and exit code 2."""
    code: Any = 0
    try:
        app(prog_name="longrnn")  # prints what is wrong with the arguments itself
    except SystemExit as leaving:
        code = leaving.code
        if code == INTERRUPTED:
            code = _interrupted()
    except UserError as error:
        code = _fail(str(error))
    except KeyboardInterrupt:
        code = _interrupted()
    except Terminated as reason:
        code = 0
        if os.environ.get("RANK", "0") == "0":
            print(f"terminated; {reason}; go on with: {_again()}")
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or str(error)
        code = _fail(f"{reason}{where}: free space or choose another folder, then: {_again()}")
    release_all()
    sys.stdout.flush()
    sys.stderr.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code or 0)  # gloo's threads abort about one normal exit in ten
    sys.exit(code)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _interrupted() -> int:
    return _fail(f"interrupted; what was finished is kept, go on with: {_again()}")


def _again() -> str:
    """The command that continues this one."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
    if arguments[:1] == ["train"]:
        arguments.append("--resume")
    # What came before the module's name in a launch is not seen from inside.
    launch = "accelerate launch … -m longrnn.cli" if "WORLD_SIZE" in os.environ else "longrnn"
    return f"{launch} {shlex.join(arguments)}"
