"""Locks: one process at a time writes a folder or a file. Reading needs no lock.

A lock is the file `.NAME.lock` beside what it protects, which its owner holds by `flock` (the
filelock library) and which names the owner. The kernel releases it however the process ends, so the
lock of a process that was killed can be taken at once.
"""

import atexit
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from longrnn.errors import UserError
from longrnn.files import naming

# Characters of a command line that an error message shows.
LONGEST_COMMAND = 160
# Those that this process holds, and those of them that it holds until it ends.
_held: set[Path] = set()
_until_the_end = ExitStack()
atexit.register(_until_the_end.close)


@contextmanager
def locked(
    target: Path, *, instead: str = "choose another output", wait: bool = False
) -> Iterator[None]:
    """Locks a folder or file within this context, unless this process has locked it already.

    Folders that were made for the lock are removed again if they stay empty.

    Args:
        target: what is protected.
        instead: what to do instead of waiting, for the error message.
        wait: wait for a process that holds the lock.

    Raises:
        UserError: another process holds the lock; or the target is the root of all folders, or a
            link to itself.
    """
    from filelock import FileLock, Timeout  # imports asyncio

    place = Path(os.path.realpath(target))
    if place.is_symlink():
        raise UserError(f"{target} is a link to itself: {instead}")
    if place == place.parent:
        raise UserError(f"{target} is the root of all folders: {instead}")
    path = place.with_name(f".{place.name}.lock")
    if path in _held:
        yield
        return
    if path.is_symlink():
        raise UserError(f"the lock {path} is a link, which longrnn never makes: remove it")
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # where no file can be, as in /proc, filelock would say that it is locked
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        owner = ""
        with suppress(FileNotFoundError):  # it has ended just now
            owner = path.read_text(errors="replace").strip()
        raise UserError(
            f"{target} is being written by another process ({owner}): wait until it ends, or "
            f"{instead}"
        ) from error
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:LONGEST_COMMAND]
    owner = f"process {os.getpid()} on {socket.gethostname()}: {command}"
    _held.add(path)
    try:
        with naming(path):
            path.write_text(owner, encoding="utf-8", errors="backslashreplace")
        yield
    finally:
        _held.remove(path)
        # Before it is released: no process locks a file that is about to be removed.
        path.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # a folder with content stays
            for folder in made:
                folder.rmdir()


def hold(target: Path, *, instead: str = "choose another output") -> None:
    """Locks a folder or file, as `locked`, until this process ends."""
    _until_the_end.enter_context(locked(target, instead=instead))


def release_all() -> None:
    """Releases what is held until the end; for an exit that runs no handlers of `atexit`."""
    _until_the_end.close()
