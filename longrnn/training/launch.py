"""Starts a command in several processes through accelerate, and ends as the command does.

Notable choices:
- The processes are those of accelerate's launcher: copies of the model (DDP) or shards (FSDP2). For
  `--cpu --num_processes 2` and `distributed_type: MULTI_CPU`, accelerate itself starts one process.
- `accelerate launch` itself ends with exit code 1 and a traceback after SIGTERM, although its
  processes have saved: its agent raises. Here, that ends with the exit code of the run.
"""

import logging
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from longrnn import processes
from longrnn.bundled import find
from longrnn.console import say
from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.programs import INTERRUPTED, UNEXPECTED, module_environment


def launch(options: Sequence[str], program: Sequence[str]) -> int:
    """Runs `longrnn PROGRAM` in the processes of a launch; returns the exit code.

    One process takes the place of this one.

    Args:
        options: of `accelerate launch`, such as `--config_file FILE`.
        program: a command of longrnn with its arguments.

    Returns:
        0 if the run ended, or was saved after SIGTERM; 130 after Ctrl-C; otherwise the code of the
        first process that failed.

    Raises:
        UserError: accelerate refuses the options, or there are fewer GPUs than processes.
    """
    from accelerate.commands.launch import multi_gpu_launcher
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.update(module_environment())
    quiet = ["--quiet"] if "--quiet" in sys.argv[1:2] else []
    os.environ[processes.LAUNCH] = shlex.join([*quiet, "launch", *options])
    # accelerate reports defaults, and the agent signals and failures; the processes print what
    # happened.
    logging.disable()
    try:
        planned = _planned(options, program)
        if planned.num_processes == 1:
            command, environment = prepare_simple_launcher_cmd_env(planned)
            os.execvpe(command[0], command, environment)
        multi_gpu_launcher(planned)
    except SignalException as received:
        return INTERRUPTED if received.sigval == signal.SIGINT else 0
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode > 0:
            return first.exitcode
        say(f"error: process {rank} was ended by {first.signal_name()}", error=True)
        return UNEXPECTED
    except UserError:
        raise
    except Exception as error:  # a configuration file can be damaged in many ways
        raise UserError(
            f"the launch is not possible ({one_line(error)}): take a configuration such as cpu2, "
            "or see `accelerate launch --help`"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _planned(options: Sequence[str], program: Sequence[str]) -> Namespace:
    """The options as accelerate completes them from its configuration files and the machine.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    parser = launch_command_parser()
    parser.error = _refuse
    arguments = parser.parse_args([*options, "-m", "longrnn.cli", *program])
    if arguments.config_file is not None:
        arguments.config_file = str(find(arguments.config_file, "configs/accelerate"))
    planned, *_ = _validate_launch_command(arguments)
    if planned.num_processes < 1:  # by default the number of GPUs
        raise UserError(f"--num_processes must be at least 1, not {planned.num_processes}: give it")
    here = planned.num_processes // (planned.num_machines or 1)
    if planned.cpu or planned.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif here > torch.cuda.device_count():
        raise UserError(
            f"the launch needs {here} GPUs on this machine, where torch can use "
            f"{torch.cuda.device_count()}: give --num_processes, or --cpu for none"
        )
    return planned


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}: `accelerate launch --help` lists the options")
