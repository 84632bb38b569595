"""`longrnn train`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from longrnn.cli.options import Quiet
from longrnn.errors import Terminated


def train(
    config: Annotated[Path, typer.Argument(help="A YAML file such as configs/train/*.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, dotted keys.", metavar="[KEY=VALUE]...")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in output_dir.")
    ] = False,
    quiet: Quiet = False,
    attended: Annotated[
        bool,
        typer.Option(
            "--attended", help="Stop as at SIGTERM when standard input ends.", hidden=True
        ),
    ] = False,
) -> None:
    """Train a model from a configuration file.

    Ctrl-C and SIGTERM finish the step, save it, and print the command to go on with.

    Example: longrnn train configs/train/passkey_tiny_short.yaml max_steps=500 output_dir=runs/try
    """
    with terminable():
        if attended:
            threading.Thread(target=_terminate_at_end_of_input, daemon=True).start()
        from longrnn.config import load_config
        from longrnn.training.config import TrainConfig
        from longrnn.training.trainer import Trainer

        settings = load_config(TrainConfig, config, overrides or [])
        trainer = Trainer(settings, resume=resume, quiet=quiet)
        trainer.train()
        if trainer.accelerator.is_main_process:
            typer.echo(f"{settings.output_dir}: trained for {trainer.step} steps")


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context, SIGTERM raises `Terminated` where Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated("what was finished is kept")

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate_at_end_of_input() -> None:
    """Sends this process SIGTERM once nobody holds the other end of standard input.

    A process that was killed says nothing to those it has started, but its pipes are closed.
    """
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
