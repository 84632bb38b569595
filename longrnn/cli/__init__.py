"""The command line. Heavy modules are imported inside the commands, so that `--help` is fast."""

from __future__ import annotations


def main() -> None:
    """Entry point of `longrnn`."""
    from longrnn.cli.app import run

    run()
