"""`longrnn launch`."""

from __future__ import annotations

import typer

from longrnn.errors import UserError

# The commands that several processes run together.
COMMANDS = ("train", "finetune")
# Pass everything on, also `--help` behind the command.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def launch(context: typer.Context) -> None:
    """Start a training run on several processes, with the options of `accelerate launch`.

    The exit code is 0 if the run ended or was saved after SIGTERM, 130 after Ctrl-C, and otherwise
    that of the process that failed.

    Example: longrnn launch --config_file configs/accelerate/cpu2.yaml train CONFIG
    """
    from longrnn.training.launch import launch as start

    arguments = context.args
    places = [arguments.index(name) for name in COMMANDS if name in arguments]
    if not places:
        raise UserError(
            "launch takes the options of accelerate and then the command train or finetune: write "
            "`longrnn launch --config_file FILE train CONFIG`"
        )
    first = min(places)
    raise typer.Exit(start(arguments[:first], arguments[first:]))
