"""The command line. Heavy modules are imported inside the commands, so that `--help` is fast."""

import os
import sys


def main() -> None:
    """Entry point of `longrnn`."""
    from longrnn.threads import limit_threads, usable_cores

    limit_threads(os.environ, usable_cores())

    try:
        from longrnn.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)  # nothing has begun
    run()
