"""Starts a run on several processes through accelerate's launcher, and ends as the run does.

`accelerate launch` itself ends with exit code 1 and a traceback after SIGTERM, although its
processes have saved: its agent raises. Here, that ends with the exit code of the run.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
from collections.abc import Sequence
from types import FrameType

from longrnn.bundled import find
from longrnn.errors import UserError
from longrnn.programs import INTERRUPTED, UNEXPECTED, module_environment

# The options of the launch, for the command that continues a run.
LAUNCH = "LONGRNN_LAUNCH"


def launch(options: Sequence[str], program: Sequence[str]) -> int:
    """Runs `longrnn PROGRAM` in the processes of a launch; returns the exit code.

    Args:
        options: of `accelerate launch`, such as `--config_file FILE`.
        program: a command of longrnn with its arguments.

    Returns:
        0 if the run ended, or was saved after SIGTERM; 130 after Ctrl-C; otherwise the code of the
        first process that failed.

    Raises:
        UserError: accelerate refuses the options.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.update(module_environment("longrnn.cli"))
    os.environ[LAUNCH] = shlex.join(options)
    # The agent reports signals and failures with tracebacks; the processes print what happened.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, _forward)
    try:
        arguments = launch_command_parser().parse_args([*options, "-m", "longrnn.cli", *program])
    except SystemExit as error:
        raise UserError(
            f"accelerate refuses the options {shlex.join(options)!r}: see `accelerate "
            "launch --help`"
        ) from error
    if arguments.config_file is not None:
        arguments.config_file = str(find(arguments.config_file, "configs/accelerate"))
    try:
        launch_command(arguments)
    except SignalException as received:
        return INTERRUPTED if received.sigval == signal.SIGINT else 0
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        return first.exitcode if first.exitcode > 0 else UNEXPECTED
    except SystemExit as ended:  # of one process, which accelerate starts without an agent
        return ended.code if isinstance(ended.code, int) else UNEXPECTED
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"the launch is not possible ({error}): see configs/accelerate/") from error
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    """Sends a signal on to the processes that this one has started."""
    import psutil

    for child in psutil.Process().children():
        child.send_signal(number)
