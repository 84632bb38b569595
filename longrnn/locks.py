"""Locks: one process at a time writes into a folder or a file. Reading needs no lock.

A lock is a file, `.longrnn.lock` inside a folder or `.NAME.lock` beside a file. It names its owner,
and it is removed when the owner releases it.

Notable choices:
- The owner holds `flock` on the lock file while it works. The kernel releases it however the
  process ends, so the lock of a process that was killed can be taken over at once, and of several
  processes that try to take it over exactly one succeeds.
- Where `flock` does not help (file systems without it, or where other hosts do not see it), the
  owner that the file names decides. It has ended when this host has no process with its id and
  start time; the lock of a process of another host is never taken over.
- A lock belongs to the process: the same process may take it several times.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longrnn.errors import UserError
from longrnn.lock_owner import Owner, read_owner, wait_for_owner, write_owner

logger = logging.getLogger(__name__)

FOLDER_LOCK = ".longrnn.lock"
# Error numbers of `flock` on file systems that do not support it.
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Attempts to open a lock file that others create and remove meanwhile.
ATTEMPTS = 1000


class Lock:
    """The lock of a folder or a file; a context manager, or `acquire` and `release`.

    It is released at the latest when this object is deleted or the process ends.

    Args:
        path: the lock file.
        target: what it protects, for the error message.
        instead: what to do instead of waiting, for the error message.
    """

    def __init__(self, path: Path, target: Path, *, instead: str) -> None:
        self.path, self.target, self.instead = path, target, instead
        self._finalizer: weakref.finalize[..., Any] | None = None

    @classmethod
    def of_folder(cls, folder: Path, *, instead: str = "choose another output folder") -> Self:
        """The lock of everything in a folder, which is created if missing."""
        return cls(folder / FOLDER_LOCK, folder, instead=instead)

    @classmethod
    def of_file(cls, path: Path, *, instead: str = "choose another output") -> Self:
        """The lock, beside it, of one file or of a folder that is renamed into place."""
        return cls(path.with_name(f".{path.name}.lock"), path, instead=instead)

    def acquire(self) -> None:
        """Takes the lock; does nothing if this object holds it already.

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
        """Releases the lock; does nothing if this object does not hold it."""
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
    """A lock of this process: its open file, folders made for it, and how often it was taken."""

    def __init__(self, descriptor: int, made: list[Path]) -> None:
        self.descriptor, self.made, self.count = descriptor, made, 0


_held: dict[Path, _Held] = {}
_until_exit: list[Lock] = []
# Reentrant, because the garbage collector may release a lock while another one is taken.
_guard = threading.RLock()


def release_all() -> None:
    """Releases every lock of this process before it exits: not every exit runs finalizers."""
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
                raise _refusal(lock, wait_for_owner(descriptor), certain=True)
            if _is_at(descriptor, lock.path):
                owner = read_owner(descriptor)
                if owner is not None and not owner.is_gone():
                    raise _refusal(lock, owner, certain=False)
                write_owner(descriptor)
                return _Held(descriptor, made)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed the file between the opening and the locking
    raise UserError(
        f"{lock.path} could not be opened, because other processes keep removing it: wait, or "
        f"{lock.instead}"
    )


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
            "at the same moment may both succeed"
        )
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _refusal(lock: Lock, owner: Owner | None, *, certain: bool) -> UserError:
    """The error for a lock that is held; `certain`: whether its owner is known to be running."""
    if owner is not None and not certain and owner.host != socket.gethostname():
        return UserError(
            f"{lock.target} is locked by a process of another host ({owner}), which may still be "
            f"writing: wait until it ends, or {lock.instead}; if it was killed, delete {lock.path}"
        )
    return UserError(
        f"{lock.target} is being written by another process ({owner or 'which has just begun'}): "
        f"wait until it ends, or {lock.instead}"
    )


def _release(key: Path, pid: int) -> None:
    """Undoes one `acquire`; does nothing in a forked child, which holds no locks."""
    with _guard:
        if pid != os.getpid() or key not in _held:
            return
        _held[key].count -= 1
        if _held[key].count == 0:
            _drop(key)


def _drop(key: Path) -> None:
    """Removes a lock file, and the folders made for it that are still empty."""
    held = _held.pop(key)
    # A lock file that cannot be removed stays, as after a kill: its owner has ended.
    with suppress(OSError):
        if _is_at(held.descriptor, key):
            key.unlink()
    os.close(
        held.descriptor
    )  # after the removal, so that no process locks a file about to be removed
    with suppress(OSError):  # a folder with content stays
        for folder in held.made:
            folder.rmdir()


def _forget() -> None:
    """Drops the locks in a forked child: they stay with the parent and end with it."""
    global _guard
    _guard = threading.RLock()
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()
    _until_exit.clear()


os.register_at_fork(after_in_child=_forget)
