"""The owner of a lock: the process that a lock file names, and whether it is still running."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

# Characters of a command line that an error message shows.
LONGEST_COMMAND = 160


class Owner(NamedTuple):
    """The process that holds a lock.

    Attributes:
        host: its host name.
        pid: its id there.
        process_start: see the function `process_start`.
        since: when it took the lock, as text.
        command: its command line.
    """

    host: str
    pid: int
    process_start: str | None
    since: str
    command: str

    def is_gone(self) -> bool:
        """Whether the process has ended for certain; false for every process of another host."""
        if self.host != socket.gethostname():
            return False
        return self.pid == os.getpid() or process_start(self.pid) != self.process_start

    def __str__(self) -> str:
        command = self.command
        if len(command) > LONGEST_COMMAND:
            command = f"{command[:LONGEST_COMMAND]}…"
        return f"process {self.pid} on {self.host} since {self.since}: {command}"


def process_start(pid: int) -> str | None:
    """The start time of a process of this host, as text; None if it has ended.

    Together with the id it identifies a process, because ids are reused.
    """
    try:
        # The name of the program, in parentheses, may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # the start in ticks since boot
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    command = ["ps", "-o", "lstart=", "-p", str(pid)]  # systems without /proc
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def write_owner(descriptor: int) -> None:
    """Writes this process into an open lock file as its owner."""
    owner = Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()),
        since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{json.dumps(owner._asdict())}\n".encode(), 0)


def wait_for_owner(descriptor: int) -> Owner | None:
    """`read_owner`, retried for 0.2 s: a new owner may not have written its record yet."""
    for _ in range(20):
        owner = read_owner(descriptor)
        if owner is not None:
            return owner
        time.sleep(0.01)
    return None


def read_owner(descriptor: int) -> Owner | None:
    """The owner that an open lock file names; None where the file holds no complete record."""
    try:
        owner = Owner(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return None
    return owner if isinstance(owner.pid, int) and isinstance(owner.host, str) else None
