"""How a script of `scripts/` begins and ends: as a command of `longrnn` does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import typer

from longrnn.errors import UserError


def new_app() -> typer.Typer:
    """An app for the commands of a script."""
    return typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)


def run_script(script: Callable[..., object] | typer.Typer, about: str | None) -> None:
    """Runs a script. Bad input leaves one sentence on standard error and exit code 2.

    Args:
        script: a function whose parameters are its options, or an app of several commands.
        about: the script's own docstring, which `--help` shows; its indented examples stay as they
            are.
    """
    text = re.sub(r"\n\n(?=    )", "\n\n\b\n", about or "")
    app = script
    if not isinstance(app, typer.Typer):
        app = new_app()
        app.command(help=text)(script)
    else:
        app.info.help = text
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
