"""`longrnn launch`."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.errors import UserError
from longrnn.options import Options

# The commands that several processes run together.
COMMANDS = ("train", "finetune", "eval", "compare")
# All options before the command are accelerate's, and all behind it the command's, `--help` too.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class Launch(Options):
    """What is started, and how."""

    words: Annotated[list[str], Argument("OPTION... COMMAND ARGUMENT")] = Field([])
    """Options of `accelerate launch`; then train, finetune, eval or compare, with its arguments."""


def launch(launch: Launch) -> None:
    """Train or evaluate in several processes, on one machine or several.

    The options are those of `accelerate launch`: --config_file takes a YAML file of accelerate or
    the name of a bundled one such as cpu2 or gpu8 (by default what `accelerate config` wrote, or
    one process per GPU); --num_processes counts processes on all machines together, --cpu uses no
    GPU; --num_machines, --machine_rank, --main_process_ip and --main_process_port join machines.

    An error that all processes have is printed once. The exit code is 0 if the command ended, or if
    its run was saved after SIGTERM; 130 after Ctrl-C; otherwise that of the process that failed.

    Example: longrnn launch --cpu --num_processes 2 train reverse_small
    """
    from longrnn.training.launch import launch as start

    places = [launch.words.index(name) for name in COMMANDS if name in launch.words]
    if not places:
        raise UserError(
            "launch takes its options and then train, finetune, eval or compare: write "
            "`longrnn launch --config_file FILE train CONFIG`"
        )
    first = min(places)
    raise typer.Exit(start(launch.words[:first], launch.words[first:]))
