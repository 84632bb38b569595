"""`longrnn train`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from longrnn.cli.options import Quiet
from longrnn.errors import Terminated, UserError


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A training configuration: a YAML file, or the name of a bundled one such as "
            "reverse_small. Then values that override it, such as length.max=512.",
            metavar="[CONFIG] [KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Continue the run in this folder, which has its configuration, up to max_steps. A "
            "checkpoint, such as RUN/checkpoint-00000500, is continued in another output_dir.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the run, do one step, and print its peak memory."),
    ] = False,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="Train with every combination of values, such as of learning_rate=1e-3,3e-4 "
            "seed=0,1: one run after another in folders of output_dir. The same command continues.",
        ),
    ] = False,
    help_config: Annotated[
        bool,
        typer.Option("--help-config", help="Print the keys of a configuration with defaults."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a model from a configuration file.

    `longrnn doctor` prints the folder of the bundled configurations. Ctrl-C and SIGTERM finish and
    save the current step, and print the command that resumes.

    Example: longrnn train passkey_tiny_short max_steps=500 output_dir=runs/try
    """
    if help_config:
        from longrnn.training.config import help_config as keys

        typer.echo(keys())
        return
    config, overrides = divided(words or [], resume, "train CONFIG")
    with terminable():
        if grid:
            from longrnn.training.grid import run_grid

            for line in run_grid(config, overrides, quiet=quiet):
                typer.echo(line)
            return
        if dry_run:
            from longrnn.training.config import read_config
            from longrnn.training.train import dry_run as check

            memory = check(read_config(config, overrides), quiet=quiet)
            echo_main(f"The configuration is valid. Peak memory of a step: {memory}.")
            return
        from longrnn.programs import continuing
        from longrnn.training.config import read_config
        from longrnn.training.train import resumed
        from longrnn.training.train import train as run

        settings = (
            read_config(config, overrides)
            if resume is None
            else resumed(resume, overrides, quiet=quiet)
        )
        continuing(Path(settings.output_dir))
        done = run(settings, resume=resume, quiet=quiet)
        echo_main(f"{done.folder}: trained for {done.rows[-1]['step']} steps")


def divided(words: list[str], resume: Path | None, usage: str) -> tuple[str, list[str]]:
    """The first argument, which is not of the form key=value, and the overrides after it.

    Args:
        words: all arguments.
        resume: the run to continue, which needs no first argument.
        usage: how the command is written without it.

    Raises:
        UserError: the first argument is missing, or one too many.
    """
    is_first = bool(words) and ("=" not in words[0] or Path(words[0]).is_file())
    if resume is not None and is_first:
        raise UserError(
            f"a resumed run has its configuration in its folder: leave out {words[0]}, and change "
            "values by key=value"
        )
    if resume is None and not is_first:
        raise UserError(
            f"nothing is named to begin with: write `longrnn {usage}`, or `longrnn "
            f"{usage.split()[0]} --resume RUN`"
        )
    return (words[0], words[1:]) if is_first else ("", words)


def echo_main(line: str) -> None:
    """Prints a line in the main process."""
    from longrnn.processes import is_main

    if is_main():
        typer.echo(line)


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context, SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated("what was finished is kept")

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
