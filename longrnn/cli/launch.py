"""`longrnn launch`."""

from __future__ import annotations

from typing import Annotated

import typer

from longrnn.errors import UserError

# The commands that several processes run together.
COMMANDS = ("train", "finetune", "eval", "compare")
# Other options are accelerate's, and all behind the command are the command's, `--help` too.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND [ARGUMENTS]...",
            help="train, finetune, eval or compare, with its arguments.",
            show_default=False,
        ),
    ],
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config_file",
            help="A launch configuration: a YAML file of accelerate, or the name of a bundled one "
            "such as cpu2 or gpu8.",
            show_default="that of `accelerate config`, if there is one",
        ),
    ] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes",
            min=1,
            help="Processes, on all machines together.",
            show_default="that of the configuration, or one per GPU",
        ),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use no GPU.")] = False,
    num_machines: Annotated[
        int | None, typer.Option("--num_machines", min=1, help="Machines.")
    ] = None,
    machine_rank: Annotated[
        int | None,
        typer.Option("--machine_rank", min=0, help="Number of this machine; the first is 0."),
    ] = None,
    main_process_ip: Annotated[
        str | None, typer.Option("--main_process_ip", help="Address of the first machine.")
    ] = None,
    main_process_port: Annotated[
        int | None,
        typer.Option(
            "--main_process_port", help="Port on the first machine.", show_default="29500"
        ),
    ] = None,
) -> None:
    """Train or evaluate in several processes, on one machine or several.

    The options come before the command; others of `accelerate launch` are passed on to it. An error
    that all processes have is printed once. The exit code is 0 if the command ended, or its run was
    saved after SIGTERM, 130 after Ctrl-C, and otherwise that of the process that failed.

    Example: longrnn launch --cpu --num_processes 2 train reverse_small
    """
    from longrnn.training.launch import launch as start

    given = {
        "config_file": config_file,
        "num_processes": num_processes,
        "num_machines": num_machines,
        "machine_rank": machine_rank,
        "main_process_ip": main_process_ip,
        "main_process_port": main_process_port,
    }
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    options += ["--cpu"] * cpu
    places = [words.index(name) for name in COMMANDS if name in words]
    if not places:
        raise UserError(
            "launch takes its options and then train, finetune, eval or compare: write "
            "`longrnn launch --config_file FILE train CONFIG`"
        )
    first = min(places)
    raise typer.Exit(start([*options, *words[:first]], words[first:]))
