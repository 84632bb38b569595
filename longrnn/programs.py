"""How every program of the project begins and ends, and how it starts another Python process.

Notable choices:
- Every program (`longrnn`, the scripts of `scripts/`) ends in `run_to_end`, which turns an error
  into a sentence on standard error and an exit code: 2 for an error that the user can fix, 130
  after Ctrl-C, 1 for an unexpected error. LONGRNN_DEBUG=1 adds the traceback. A reader that closes
  the output, as `head` does, ends a program quietly with 141, the code that a shell gives SIGPIPE.
- A process that this project starts never imports from the current folder: a file `yaml.py` beside
  a user's texts is not ours to run.
"""

import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from io import TextIOWrapper
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

from longrnn.console import PlainFormatter, say
from longrnn.errors import Terminated, UserError
from longrnn.files import one_line
from longrnn.locks import release_all
from longrnn.processes import is_first

DEBUG = "LONGRNN_DEBUG"
# Exit codes: an error that the user can fix, Ctrl-C, an unexpected error, and a closed output.
REFUSED, INTERRUPTED, UNEXPECTED, CLOSED = 2, 130, 1, 141
# Characters of another library's message; the traceback has all of it.
LONGEST_DETAIL = 300

# A name in a path, of more than 100 characters; its middle is not shown.
_LONG_NAME = re.compile(r"([^\s/]{60})[^\s/]{21,}([^\s/]{20})")
# How torch words a failed allocation, which is a plain RuntimeError on a CPU, and its size.
_NO_MEMORY = re.compile(
    "can't allocate memory|out of memory|not enough memory|(calculation|multiplication) overflow",
    re.IGNORECASE,
)
_SIZE = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGTP]iB)")


def run_to_end(program: Callable[[], object], *, again: Callable[[], str]) -> NoReturn:
    """Runs a program and leaves the process; an error is one sentence on standard error.

    Args:
        program: what to run, such as a typer app.
        again: the command that continues an interrupted program.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Characters that the encoding lacks are printed as `\\u2013`.
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())
    code = _ending(program, again)
    release_all()
    if "WORLD_SIZE" in os.environ:
        os._exit(code or 0)  # gloo's threads abort about one normal exit in ten
    sys.exit(code)


def _ending(program: Callable[[], object], again: Callable[[], str]) -> Any:
    """The exit code of a program, after the sentence about its error."""
    code: Any = 0
    try:
        try:
            program()
        except SystemExit as leaving:
            if isinstance(leaving.__context__, BrokenPipeError):  # of rich, which exits with 1
                return _fail(leaving.__context__, again)
            code = leaving.code
        except Terminated as reason:
            if is_first():
                say(f"terminated; {reason}; go on with: {again()}")
        print(end="", flush=True)
    except BaseException as error:  # the last handler: whatever it is becomes a sentence
        return _fail(error, again)
    return code


def _fail(error: BaseException, again: Callable[[], str]) -> int:
    if os.environ.get(DEBUG, "") not in ("", "0"):
        traceback.print_exception(error)
    sentence, code = describe(error, again())
    try:
        print(end="", flush=True)
    except OSError:  # Python flushes once more at its end, and prints a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return CLOSED
    if _is_first(sentence):
        say(f"error: {sentence}".replace("\n", " "), error=True)
    return code


def _is_first(sentence: str) -> bool:
    """Whether no other process of a launch has printed this error.

    The store in which the processes of `accelerate launch` or torchrun find each other counts it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    # The launcher terminates the others when one has failed, and this process has yet to print.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        return store.add(f"longrnn: {sentence}", 1) == 1
    except RuntimeError:  # the launcher has ended
        return True


def describe(error: BaseException, again: str) -> tuple[str, int]:
    """The sentence for an error, and its exit code.

    Args:
        error: what ended the program.
        again: the command that continues it.
    """
    if isinstance(error, UserError):
        return _LONG_NAME.sub(r"\1…\2", str(error)), REFUSED
    if isinstance(error, KeyboardInterrupt):
        kept = str(error) or "what was finished is kept"
        return f"interrupted; {kept}; go on with: {again}", INTERRUPTED
    detail = f" ({shorten(str(error), LONGEST_DETAIL, placeholder=' …')})" if str(error) else ""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        what = _LONG_NAME.sub(r"\1…\2", str(error.filename or "a file or connection"))
        return (
            f"{what} cannot be used ({error.strerror}): check path, permissions and free space, or "
            f"choose another folder, then: {again}",
            REFUSED,
        )
    if is_out_of_memory(error):
        size = _SIZE.search(str(error))
        wanted = "" if size is None else f" for {float(size[1]):,.15g} {size[2]}"
        return (
            f"not enough memory{wanted}: use a smaller batch size, length or model, or another "
            "device",
            REFUSED,
        )
    return (
        f"unexpected {type(error).__name__}{detail}; run again with {DEBUG}=1 for the traceback",
        UNEXPECTED,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, by Python or by torch on any device."""
    is_of_torch = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    return isinstance(error, MemoryError) or is_of_torch


def reason_of(error: Exception) -> str:
    """The first sentence of an error; one for lack of memory is raised again, as what it is."""
    if is_out_of_memory(error):
        raise error
    return one_line(error)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module`, to be started with `module_environment()`."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """This process's environment, in which a child imports the same longrnn as this process.

    It does not import from the current folder. The folder of this project is added at the end of
    PYTHONPATH.
    """
    # A child of a process of a launch does not belong to the launch.
    values = {name: v for name, v in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    root = str(Path(__file__).resolve().parents[1])
    given = [path for path in values.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**values, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([*given, root])}
