"""Locks: one process at a time writes a folder or a file. Reading needs no lock.

A lock is the file `.NAME.lock` beside what it protects, which its owner holds by `flock` (the
filelock library) and which names the owner. The kernel releases it however the process ends, so the
lock of a process that was killed can be taken at once.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from longrnn.errors import UserError

# Characters of a command line that an error message shows.
LONGEST_COMMAND = 160
# Those that this process holds.
_held: list[Lock] = []


class LockedError(UserError):
    """Another process holds a lock."""


class Lock:
    """The lock of a folder or file; a context manager, or `acquire` and `release`.

    It belongs to the process: the same process may take it several times.

    Args:
        target: what it protects.
        instead: what to do instead of waiting, for the error message.
    """

    def __init__(self, target: Path, *, instead: str = "choose another output") -> None:
        self.target, self.instead = target, instead
        self.path = target.resolve().with_name(f".{target.resolve().name}.lock")
        self._made: list[Path] = []

    def acquire(self) -> None:
        """Takes the lock until `release`, or until the process ends.

        Raises:
            LockedError: another process holds it.
        """
        folder = self.path.parent
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path, thread_local=False, is_singleton=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            owner = ""
            with suppress(FileNotFoundError):  # it has ended just now
                owner = self.path.read_text(errors="replace").strip()
            raise LockedError(
                f"{self.target} is being written by another process ({owner}): wait until it ends, "
                f"or {self.instead}"
            ) from error
        _held.append(self)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:LONGEST_COMMAND]
        owner = f"process {os.getpid()} on {socket.gethostname()}: {command}"
        self.path.write_text(owner, encoding="utf-8", errors="backslashreplace")

    def release(self) -> None:
        """Releases the lock, and removes folders that were made for it and are empty."""
        if self not in _held:
            return
        _held.remove(self)
        # Before it is released: no process locks a file that is about to be removed.
        if self._lock.lock_counter == 1:
            self.path.unlink(missing_ok=True)
        self._lock.release()
        with suppress(OSError):  # a folder with content stays
            for folder in self._made:
                folder.rmdir()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def release_all() -> None:
    """Releases every lock of this process before it exits: not every exit runs finalizers."""
    for lock in _held[::-1]:
        lock.release()
