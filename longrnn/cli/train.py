"""`longrnn train`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

from longrnn.cli.options import Configuration, Quiet
from longrnn.errors import Terminated


def train(
    config: Configuration,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Values that override the configuration, such as length.max=512.",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in output_dir.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the configuration and its data, which must be here, and print the memory "
            "of a step; train nothing.",
        ),
    ] = False,
    extend_to: Annotated[
        int | None,
        typer.Option(
            "--extend-to",
            metavar="STEPS",
            min=1,
            help="Continue the run in output_dir, finished or not, up to this many steps.",
        ),
    ] = None,
    quiet: Quiet = False,
    attended: Annotated[
        bool,
        typer.Option(
            "--attended", help="Stop as at SIGTERM when standard input ends.", hidden=True
        ),
    ] = False,
) -> None:
    """Train a model from a configuration file.

    `longrnn doctor` prints the folder of the bundled configurations. Ctrl-C and SIGTERM finish and
    save the current step, and print the command that resumes.

    Example: longrnn train passkey_tiny_short max_steps=500 output_dir=runs/try
    """
    with terminable():
        if attended:
            threading.Thread(target=_terminate_at_end_of_input, daemon=True).start()
        from longrnn.config import load_config
        from longrnn.training.config import TrainConfig

        settings = load_config(TrainConfig, config, overrides or [])
        if dry_run:
            from longrnn.training.checks import check
            from longrnn.training.memory import report

            check(settings)
            typer.echo(report(settings))
            return
        from longrnn.training.extension import extended
        from longrnn.training.trainer import Trainer

        extend = extend_to is not None
        if extend_to is not None:
            settings = extended(settings, extend_to)
        trainer = Trainer(settings, resume=resume, quiet=quiet, extend=extend)
        trainer.train()
        if trainer.accelerator.is_main_process:
            typer.echo(f"{settings.output_dir}: trained for {trainer.step} steps")


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


def _terminate_at_end_of_input() -> None:
    """Sends this process SIGTERM when the other end of standard input is closed.

    A parent process that is killed cannot tell its children, but its pipes are closed.
    """
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
