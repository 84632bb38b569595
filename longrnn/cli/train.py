"""`longrnn train`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.cli.options import Quiet
from longrnn.errors import Terminated, UserError

if TYPE_CHECKING:
    from longrnn.training.config import TrainConfig


class Resumable(Quiet):
    """How a run begins."""

    resume: Path | None = None
    """Continue the run in this folder, which has its configuration, up to max_steps. A checkpoint
    in it, such as RUN/checkpoint-00000500, is continued in another output_dir."""
    dry_run: bool = False
    """Check the run, do one step, and print its peak memory."""


class Training(Resumable):
    """What is trained."""

    words: Annotated[list[str], Argument("[CONFIG] [KEY=VALUE]")] = Field([])
    """A training configuration: a YAML file, or the name of a bundled one such as reverse_small.
    Then values that override it, such as length.max=512."""
    grid: bool = False
    """Train with every combination of values, such as of learning_rate=1e-3,3e-4 seed=0,1: one run
    after another in folders of output_dir. The same command continues."""
    help_config: bool = False
    """Print the keys of a configuration with defaults."""


def train(training: Training) -> None:
    """Train a model from a configuration file.

    `longrnn doctor` prints the folder of the bundled configurations. Ctrl-C and SIGTERM finish and
    save the current step, and print the command that resumes.

    Example: longrnn train passkey_tiny_short max_steps=500 output_dir=runs/try
    """
    from longrnn.training.config import configured, help_config

    if training.help_config:
        typer.echo(help_config())
        return
    config, overrides = divided(training.words, training.resume, "train CONFIG")
    with terminable():
        if training.grid:
            from longrnn.training.grid import run_grid

            for line in run_grid(config, overrides, quiet=training.quiet):
                typer.echo(line)
        elif training.resume is None:
            run(configured(config, overrides), training)
        else:
            run(resumed(training, overrides), training)


def run(config: TrainConfig, options: Resumable) -> bool:
    """Trains, or only tries one step; returns whether the run ended."""
    from longrnn.programs import continuing
    from longrnn.training.train import dry_run
    from longrnn.training.train import train as start

    if options.dry_run:
        memory = dry_run(config, quiet=options.quiet)
        echo_main(f"The configuration is valid. Peak memory of a step: {memory}.")
        return False
    continuing(Path(config.output_dir))
    done = start(config, resume=options.resume, quiet=options.quiet)
    echo_main(f"{done.folder}: trained for {done.rows[-1]['step']} steps")
    return True


def resumed(options: Resumable, overrides: list[str]) -> TrainConfig:
    """Returns the configuration of the run to continue."""
    from longrnn.training.train import resumed as read

    assert options.resume is not None
    return read(options.resume, overrides, quiet=options.quiet)


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
