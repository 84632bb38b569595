"""How a script of `scripts/` ends: as a command of `longrnn` does."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from longrnn.errors import UserError


def run_script(script: Callable[..., object] | typer.Typer) -> None:
    """Runs a script. Bad input leaves one sentence on standard error and exit code 2.

    Args:
        script: a function whose parameters are its options, or an app of several commands.
    """
    try:
        if isinstance(script, typer.Typer):
            script()
        else:
            typer.run(script)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
