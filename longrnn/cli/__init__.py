"""The command line. Heavy modules are imported inside the commands, so that `--help` is fast."""

import os
import sys
from collections.abc import Sequence

# Words of commands that import nothing heavy, or print nothing else.
LIGHT = {"--help", "--version", "--quiet", "data"}


def main() -> None:
    """Entry point of `longrnn`."""
    from longrnn.threads import limit_threads, usable_cores

    limit_threads(os.environ, usable_cores())
    announce(sys.argv[1:])

    try:
        from longrnn.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)  # nothing has begun
    run()


def announce(words: Sequence[str]) -> None:
    """Say on a terminal what takes the first seconds of a command."""
    is_main = os.environ.get("RANK", "0") == "0"
    if words and is_main and sys.stderr.isatty() and not LIGHT & {*words}:
        print(f"loading torch for `longrnn {words[0]}` …", file=sys.stderr, flush=True)
