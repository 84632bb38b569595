"""`longrnn launch`."""

from __future__ import annotations

import typer

from longrnn.errors import UserError

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
    if "train" not in arguments:
        raise UserError(
            "launch takes the options of accelerate and then the command train: write `longrnn "
            "launch --config_file FILE train CONFIG`"
        )
    first = arguments.index("train")
    raise typer.Exit(start(arguments[:first], arguments[first:]))
