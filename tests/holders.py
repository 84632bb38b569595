"""Other processes that hold a lock."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from longrnn.locks import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of a folder or file until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Within this context another process, whose id is the value, holds the lock of `path`."""
    process = holder(path)
    try:
        yield process.pid
    finally:
        process.communicate()
