"""`longrnn train`."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from pydantic import Field

from longrnn.cli.command import Argument
from longrnn.errors import Terminated, UserError
from longrnn.options import Options
from longrnn.progress import is_quiet

if TYPE_CHECKING:
    from longrnn.training.config import TrainConfig

# The folder of the run that this process trains: an interrupted command is continued from it.
CURRENT: list[Path] = []


class Resumable(Options):
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
    from longrnn.training.train import resumed

    if training.help_config:
        typer.echo(help_config())
        return
    config, overrides = divided(training.words, training.resume, "train CONFIG")
    end_at_sigterm()
    if training.grid:
        from longrnn.training.grid import run_grid

        for line in run_grid(config, overrides, quiet=is_quiet()):
            typer.echo(line)
    elif training.resume is None:
        run(configured(config, overrides), training)
    else:
        run(resumed(training.resume, overrides, quiet=is_quiet()), training)


def run(config: TrainConfig, options: Resumable) -> bool:
    """Train, or only try one step; return whether the run ended."""
    from longrnn.training.train import dry_run
    from longrnn.training.train import train as start

    if options.dry_run:
        memory = dry_run(config, quiet=is_quiet())
        echo_main(f"The configuration is valid. Peak memory of a step: {memory}.")
        return False
    CURRENT[:] = [Path(config.output_dir)]
    done = start(config, resume=options.resume, quiet=is_quiet())
    echo_main(f"{done.folder}: trained for {done.rows[-1]['step']} steps")
    return True


def divided(words: list[str], resume: Path | None, usage: str) -> tuple[str, list[str]]:
    """Return the first argument, which a resumed run does not have, and the overrides after it.

    Args:
        words: all arguments.
        resume: the run to continue.
        usage: how the command is written without it.

    Raises:
        UserError: the first argument is missing.
    """
    if resume is not None:
        return "", words
    if not words or ("=" in words[0] and not Path(words[0]).is_file()):
        raise UserError(
            f"nothing is named to begin with: write `longrnn {usage}`, or `longrnn "
            f"{usage.split()[0]} --resume RUN`"
        )
    return words[0], words[1:]


def echo_main(line: str) -> None:
    """Prints a line in the main process."""
    from longrnn.processes import is_main

    if is_main():
        typer.echo(line)


def end_at_sigterm() -> None:
    """Make SIGTERM raise `Terminated` from now on, as Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated("what was finished is kept")

    signal.signal(signal.SIGTERM, leave)
