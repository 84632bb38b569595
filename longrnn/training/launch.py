"""Starts a command in several processes through accelerate, and ends as the command does.

Notable choices:
- A launch with more processes than GPUs is refused before anything is started.
- An error that all processes raise is printed once.
- `accelerate launch` itself ends with exit code 1 and a traceback after SIGTERM, although its
  processes have saved: its agent raises. Here, that ends with the exit code of the run.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from longrnn.bundled import find
from longrnn.errors import UserError
from longrnn.programs import (
    ERRORS,
    INTERRUPTED,
    UNEXPECTED,
    module_environment,
)

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
        UserError: accelerate refuses the options, or there are fewer GPUs than processes.
    """
    os.environ.update(module_environment("longrnn.cli"))
    os.environ[LAUNCH] = shlex.join(options)
    # accelerate reports defaults, and the agent signals and failures with tracebacks; the processes
    # print what happened.
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, _forward)
    arguments = _parsed(options, program)
    with TemporaryDirectory() as errors:
        os.environ[ERRORS] = errors
        code = _start(arguments)
        sentences = [path.read_text() for path in sorted(Path(errors).iterdir())]
    for sentence in dict.fromkeys(sentences):
        print(f"error: {sentence}", file=sys.stderr)
    return code


def _parsed(options: Sequence[str], program: Sequence[str]) -> Namespace:
    """The options as accelerate reads them.

    They start several CPU processes where these are asked for. accelerate itself starts one process
    for `--cpu --num_processes 2`, and for a configuration with `distributed_type: MULTI_CPU`.
    """
    from accelerate.commands.launch import launch_command_parser

    try:
        arguments = launch_command_parser().parse_args([*options, "-m", "longrnn.cli", *program])
    except SystemExit as error:
        raise UserError(
            f"accelerate refuses the options {shlex.join(options)!r}: see `accelerate "
            "launch --help`"
        ) from error
    if arguments.config_file is not None:
        arguments.config_file = str(find(arguments.config_file, "configs/accelerate"))
    planned = _planned(arguments)
    if _on_cpu(planned) and planned.num_processes > 1 and planned.mpirun_hostfile is None:
        arguments.cpu, arguments.use_cpu = False, True
        arguments.multi_gpu = not planned.use_fsdp
    return arguments


def _planned(arguments: Namespace) -> Namespace:
    """The arguments with what accelerate adds from its configuration files and the machine.

    Raises:
        UserError: accelerate refuses them, or there are fewer GPUs than processes.
    """
    import torch
    from accelerate.commands.launch import _validate_launch_command

    try:
        planned, *_ = _validate_launch_command(copy(arguments))
    except (ValueError, FileNotFoundError) as error:
        raise _impossible(error) from error
    if _on_cpu(planned):
        return planned
    gpus = torch.cuda.device_count()
    if planned.gpu_ids not in (None, "all"):
        gpus = min(gpus, len(planned.gpu_ids.split(",")))
    here = planned.num_processes // (planned.num_machines or 1)
    if here > gpus:
        raise UserError(
            f"the launch starts {here} process{'es' * (here > 1)} with a GPU each on this machine, "
            f"where torch can use {gpus}: give --num_processes, or --cpu for processes without GPUs"
        )
    return planned


def _on_cpu(planned: Namespace) -> bool:
    return planned.cpu or getattr(planned, "use_cpu", False)


def _start(arguments: Namespace) -> int:
    """Starts the processes of a launch, and returns their exit code at the end."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(arguments)
    except SignalException as received:
        return INTERRUPTED if received.sigval == signal.SIGINT else 0
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode > 0:
            return first.exitcode
        print(f"error: process {rank} was ended by {first.signal_name()}", file=sys.stderr)
        return UNEXPECTED
    except subprocess.CalledProcessError as failed:  # of one process, without an agent
        return failed.returncode if failed.returncode > 0 else UNEXPECTED
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else UNEXPECTED
    except (ValueError, FileNotFoundError) as error:
        raise _impossible(error) from error
    return 0


def _impossible(error: Exception) -> UserError:
    return UserError(
        f"the launch is not possible ({error}): take a configuration such as cpu2, or see "
        "`accelerate launch --help`"
    )


def _forward(number: int, frame: FrameType | None) -> None:
    """Sends a signal on to the processes that this one has started."""
    import psutil

    for child in psutil.Process().children():
        child.send_signal(number)
