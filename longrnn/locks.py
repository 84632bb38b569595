"""Locks: one process at a time writes into a folder or a file. Reading needs no lock.

A lock is a file, `.longrnn.lock` inside a folder or `.NAME.lock` beside a file. It names its owner,
and it is removed when the owner releases it.

Notable choices:
- The owner holds `flock` on the lock file while it works. The kernel lets go of it however the
  process ends, so the lock of a process that was killed can be taken over at once, and of several
  processes that try to take it over exactly one succeeds.
- The owner that the file names decides where `flock` cannot: file systems without it, and those
  where other hosts do not see it. The owner is known to be gone when this host has no process of
  that id and start time; the lock of a process of another host is never taken over.
- A lock belongs to the process: the same process may take it several times.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from longrnn.errors import UserError

logger = logging.getLogger(__name__)

FOLDER_LOCK = ".longrnn.lock"
# What `flock` fails with on file systems that do not have it.
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Characters of a command that a refusal shows.
LONGEST_COMMAND = 160
# Attempts to open a lock file that others create and remove meanwhile.
ATTEMPTS = 1000


class Owner(NamedTuple):
    """The process that holds a lock.

    Attributes:
        host: its host name.
        pid: its id there.
        process_start: when it began, see `process_start`.
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


class Lock:
    """The lock of a folder or a file; a context manager, or `acquire` and `release`.

    It is released at the latest when this object or the process is gone.

    Args:
        path: the lock file.
        target: what it protects, for errors.
        instead: what to do instead of waiting, for errors.
    """

    def __init__(self, path: Path, target: Path, *, instead: str) -> None:
        self.path, self.target, self.instead = path, target, instead
        self._finalizer: weakref.finalize[..., Any] | None = None

    @classmethod
    def of_folder(cls, folder: Path, *, instead: str = "choose another output folder") -> Self:
        """The lock of everything in a folder, which is made where it is missing."""
        return cls(folder / FOLDER_LOCK, folder, instead=instead)

    @classmethod
    def of_file(cls, path: Path, *, instead: str = "choose another output") -> Self:
        """The lock of one file, or of a folder that appears as a whole; it lies beside it."""
        return cls(path.with_name(f".{path.name}.lock"), path, instead=instead)

    def acquire(self) -> None:
        """Takes the lock; nothing happens where this object holds it already.

        Raises:
            UserError: another process holds it.
        """
        if self._finalizer is not None and self._finalizer.alive:
            return
        key = Path(os.path.realpath(self.path.parent)) / self.path.name
        with _guard:
            if key not in _held:
                _held[key] = _take(self)
            _held[key].count += 1
        self._finalizer = weakref.finalize(self, _release, key, os.getpid())

    def release(self) -> None:
        """Lets go of the lock; nothing happens where this object does not hold it."""
        if self._finalizer is not None:
            self._finalizer()

    def hold_until_exit(self) -> None:
        """Takes the lock until `release_all`, or until the process ends.

        Raises:
            UserError: another process holds it.
        """
        self.acquire()
        _until_exit.append(self)

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


class _Held:
    """A lock of this process: its open file, how often it was taken, folders made for it."""

    def __init__(self, descriptor: int, made: list[Path]) -> None:
        self.descriptor, self.made, self.count = descriptor, made, 0


_held: dict[Path, _Held] = {}
_until_exit: list[Lock] = []
# Reentrant, because the garbage collector may release a lock while another one is taken.
_guard = threading.RLock()


def process_start(pid: int) -> str | None:
    """What tells a process of this host from later ones of its id; None where it has ended."""
    try:
        # The name of the program, in parentheses, may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # the start in ticks since boot
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    command = ["ps", "-o", "lstart=", "-p", str(pid)]  # systems without /proc
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def release_all() -> None:
    """Releases every lock of this process, as its last act: not every exit runs finalizers."""
    with _guard:
        _until_exit.clear()
        for key in list(_held):
            _drop(key)


def _take(lock: Lock) -> _Held:
    """Opens a lock file as its only owner.

    Raises:
        UserError: another process holds it.
    """
    folder = lock.path.parent
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    for _ in range(ATTEMPTS):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(lock.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the folder was removed meanwhile
            continue
        try:
            if not _flocked(descriptor, lock.path):
                raise _refusal(lock, _read_owner(descriptor), certain=True)
            if _is_at(descriptor, lock.path):
                owner = _parsed(os.pread(descriptor, 1 << 16, 0))
                if owner is not None and not owner.is_gone():
                    raise _refusal(lock, owner, certain=False)
                _write_owner(descriptor)
                return _Held(descriptor, made)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed the file between the opening and the locking
    raise UserError(f"{lock.path} could not be opened, others keep removing it: {lock.instead}")


def _flocked(descriptor: int, path: Path) -> bool:
    """Takes `flock` of an open file; false where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning(
            f"the file system of {path} has no file locks: two processes that begin to write there "
            "at the same moment are not told apart"
        )
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write_owner(descriptor: int) -> None:
    owner = Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()),
        since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{json.dumps(owner._asdict())}\n".encode(), 0)


def _read_owner(descriptor: int) -> Owner | None:
    """Who holds an open lock file; whoever has just taken it may not have written that yet."""
    for _ in range(20):
        owner = _parsed(os.pread(descriptor, 1 << 16, 0))
        if owner is not None:
            return owner
        time.sleep(0.01)
    return None


def _parsed(content: bytes) -> Owner | None:
    """The owner in a lock file; None where a kill left no whole one."""
    try:
        owner = Owner(**json.loads(content))
    except (ValueError, TypeError):
        return None
    return owner if isinstance(owner.pid, int) and isinstance(owner.host, str) else None


def _refusal(lock: Lock, owner: Owner | None, *, certain: bool) -> UserError:
    """Why a lock cannot be taken; `certain` where its owner is known to be at work."""
    message = (
        f"{lock.target} is being written by another process ({owner or 'which has just begun'}): "
        f"wait until it ends, or {lock.instead}"
    )
    if owner is not None and not certain and owner.host != socket.gethostname():
        message = (
            f"{lock.target} is locked by a process of another host ({owner}), which may still be "
            f"writing: wait until it ends, or {lock.instead}; if it was killed, delete {lock.path}"
        )
    return UserError(message)


def _release(key: Path, pid: int) -> None:
    """Takes back one `acquire`; a forked child that inherited it has nothing to take back."""
    with _guard:
        if pid != os.getpid() or key not in _held:
            return
        _held[key].count -= 1
        if _held[key].count == 0:
            _drop(key)


def _drop(key: Path) -> None:
    """Removes a lock file, and the folders made for it that are still empty."""
    held = _held.pop(key)
    # A lock file that cannot be removed is left, as after a kill: its owner is gone.
    with suppress(OSError):
        if _is_at(held.descriptor, key):
            key.unlink()
    os.close(held.descriptor)  # only now, so that nobody locks a file about to be removed
    with suppress(OSError):  # a folder that something was written into stays
        for folder in held.made:
            folder.rmdir()


def _forget() -> None:
    """In a forked child: the locks stay the parent's, and end with it and not with the child."""
    global _guard
    _guard = threading.RLock()
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()
    _until_exit.clear()


os.register_at_fork(after_in_child=_forget)
