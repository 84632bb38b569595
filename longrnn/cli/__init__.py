"""The command line. Heavy modules are imported inside the commands, so that `--help` is fast."""

from __future__ import annotations


def main() -> None:
    """Entry point of `longrnn`."""
    import os

    from longrnn.threads import limit_threads, usable_cores

    limit_threads(os.environ, usable_cores())

    from longrnn.cli.app import run

    run()
