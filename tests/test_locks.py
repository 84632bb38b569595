"""Locks between real processes: refused, released, taken over, and never held by two."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longrnn import locks
from longrnn.errors import UserError
from longrnn.lock_owner import process_start
from longrnn.locks import Lock
from tests.holders import held, holder
from tests.refusals import naming

pytestmark = pytest.mark.core

NAMES = {"folder": ".longrnn.lock", "file": ".out.lock"}


def lock_of(kind: str, path: Path) -> Lock:
    return Lock.of_folder(path) if kind == "folder" else Lock.of_file(path)


def record(path: Path, **changes: Any) -> None:
    """Writes a lock file that no process holds, as a killed process leaves it."""
    owner = {
        "host": socket.gethostname(),
        "pid": os.getppid(),
        "process_start": process_start(os.getppid()),
        "since": "2026-01-01 00:00:00+00:00",
        "command": "longrnn train run.yaml",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**owner, **changes}))


@pytest.mark.parametrize("kind", NAMES)
def test_the_refusal_names_the_owner_and_the_remedy(tmp_path: Path, kind: str) -> None:
    """Host, process id, since when, which command; one line; nothing is changed."""
    target = tmp_path / "a/out"
    with held(target, kind) as pid:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as error:
            lock_of(kind, target).acquire()
        message = str(error.value)
        assert "\n" not in message
        assert all(name in message for name in (str(target), str(pid), socket.gethostname()))
        assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with lock_of(kind, target):
        pass


@pytest.mark.parametrize("kind", NAMES)
def test_a_released_lock_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    """Neither the lock file nor folders that were made for it; folders with content stay."""
    target = tmp_path / "a/b/out"
    with lock_of(kind, target):
        (found,) = (path for path in tmp_path.rglob("*") if path.is_file())
        assert found.name == NAMES[kind]
    assert list(tmp_path.iterdir()) == []
    with lock_of(kind, target):
        (tmp_path / "a/kept").write_text("content")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


def test_reading_is_not_held_up(tmp_path: Path) -> None:
    """A folder that another process writes into can be listed and its files read."""
    (tmp_path / "row").write_text("1")
    with held(tmp_path):
        assert (tmp_path / "row").read_text() == "1"
        assert {path.name for path in tmp_path.iterdir()} == {"row", ".longrnn.lock"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, number: signal.Signals) -> None:
    """The file it left, with its process id, does not hold up the next process."""
    process = holder(tmp_path)
    process.send_signal(number)
    process.wait()
    assert json.loads((tmp_path / ".longrnn.lock").read_text())["pid"] == process.pid
    with Lock.of_folder(tmp_path):
        owner = json.loads((tmp_path / ".longrnn.lock").read_text())
        assert owner["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []
    process.communicate()


def test_the_lock_of_a_zombie_is_taken_over(tmp_path: Path) -> None:
    """A killed process that its parent has not waited for still has a process id."""
    process = holder(tmp_path)
    process.kill()
    deadline = time.monotonic() + 10
    while process_start(process.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{process.pid}").exists()
    with Lock.of_folder(tmp_path):
        pass
    process.communicate()


def test_a_reused_process_id_is_told_apart_by_its_start(tmp_path: Path) -> None:
    """A live process of the id, but of another start time, is not the owner."""
    path = tmp_path / ".longrnn.lock"
    record(path)
    with pytest.raises(UserError, match=naming(os.getppid())):
        Lock.of_folder(tmp_path).acquire()
    record(path, process_start="1")
    with Lock.of_folder(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_the_lock_of_another_host_is_not_taken_over(tmp_path: Path) -> None:
    """Whether its process lives cannot be seen from here: the message says what to delete."""
    path = tmp_path / ".longrnn.lock"
    record(path, host="node7", pid=2**22 + 1)
    before = path.read_bytes()
    with pytest.raises(UserError) as error:
        Lock.of_folder(tmp_path, instead="choose another --output").acquire()
    for name in (str(2**22 + 1), "node7", "longrnn train run.yaml", "--output", str(path)):
        assert name in str(error.value)
    assert path.read_bytes() == before
    path.unlink()
    with Lock.of_folder(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\x00", b"null"])
def test_half_a_lock_file_is_taken_over(tmp_path: Path, content: bytes) -> None:
    """A lock file without a complete owner record, as a kill leaves it, is taken over."""
    (tmp_path / ".longrnn.lock").write_bytes(content)
    with Lock.of_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_process_may_take_its_lock_again(tmp_path: Path) -> None:
    """A command locks its folder, and so does what it calls; the last release frees it."""
    outer, inner = Lock.of_folder(tmp_path), Lock.of_folder(tmp_path / "../" / tmp_path.name)
    with outer:
        with inner, inner:
            pass
        outer.acquire()
        assert (tmp_path / ".longrnn.lock").exists()
        inner.release()
        assert (tmp_path / ".longrnn.lock").exists()
    assert not (tmp_path / ".longrnn.lock").exists()


def test_a_lock_ends_with_its_object(tmp_path: Path) -> None:
    """A lock whose object is deleted is released."""
    lock = Lock.of_folder(tmp_path)
    lock.acquire()
    del lock
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "last", ["", "sys.exit(3)", "raise ValueError", "locks.release_all(); os._exit(0)"]
)
def test_a_lock_is_released_at_exit(tmp_path: Path, last: str) -> None:
    """A process releases its locks whichever way it exits."""
    program = (
        "import os, sys; from pathlib import Path; from longrnn import locks\n"
        f"locks.Lock.of_folder(Path({str(tmp_path)!r})).hold_until_exit()\n"
        f"assert Path({str(tmp_path)!r}, '.longrnn.lock').exists()\n{last}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "AssertionError" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_neither_holds_nor_releases_the_lock(tmp_path: Path) -> None:
    """Workers that outlive a killed owner do not keep its lock, and a child that ends leaves it."""
    program = """
import os, signal, sys, time
from pathlib import Path
from longrnn import locks
folder = Path(sys.argv[1])
lock = locks.Lock.of_folder(folder)
lock.acquire()
child = os.fork()
if child == 0:
    lock.release()  # not the child's to release
    assert (folder / ".longrnn.lock").exists()
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    with pytest.raises(UserError, match=naming(process.pid)):
        Lock.of_folder(tmp_path).acquire()
    process.kill()
    process.wait()
    assert process_start(child) is not None, "the child has outlived its parent"
    with Lock.of_folder(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    process.stdout.close()


RACE = """
import os, sys, time
from pathlib import Path
from longrnn.errors import UserError
from longrnn.locks import Lock
folder, begin = Path(sys.argv[1]), float(sys.argv[2])
taken = 0
while time.time() < begin:
    pass
while time.time() < begin + 2:
    lock = Lock.of_folder(folder / "x")
    try:
        lock.acquire()
    except UserError:
        continue
    taken += 1
    inside = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)  # fails where another is inside
    os.close(inside)
    os.unlink(folder / "inside")
    if taken % 3 == 0:  # as a process that was killed leaves it: named, and not held
        os.unlink(folder / "x/.longrnn.lock")
        (folder / "x/.longrnn.lock").write_text(
            '{"host": "%s", "pid": 1, "process_start": "0", "since": "", "command": ""}'
            % os.uname().nodename
        )
    lock.release()
print(taken)
"""


def test_many_processes_never_hold_one_lock_together(tmp_path: Path) -> None:
    """Taken, released and taken over thousands of times by processes that begin at once."""
    begin = str(time.time() + 1.5)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), begin],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    ends = [racer.communicate() for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4, ends
    taken = [int(out) for out, _ in ends]
    assert all(taken)
    assert sum(taken) > 100


def test_one_of_two_takes_over_a_dead_lock(tmp_path: Path) -> None:
    """Of two processes that see a dead owner at the same moment, one gets the lock and the other is
    refused.
    """
    program = """
import sys, time
from pathlib import Path
from longrnn.errors import UserError
from longrnn.locks import Lock
lock = Lock.of_folder(Path(sys.argv[1]))
while time.time() < float(sys.argv[2]):
    pass
try:
    lock.acquire()
    print("taken", flush=True)
    sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""
    for number in range(5):
        folder = tmp_path / str(number)
        record(folder / ".longrnn.lock", process_start="1")
        begin = str(time.time() + 0.7)
        both = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(folder), begin],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        said = []
        for process in both:
            assert process.stdout is not None
            said.append(process.stdout.readline().strip())
        for process in both:
            process.communicate()
        assert sorted(line == "taken" for line in said) == [False, True], said
        assert any("another process" in line for line in said)


@pytest.mark.parametrize("code", sorted({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}))
def test_without_file_locks_the_owner_that_is_named_decides(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Network file systems without `flock`: a warning, and live owners are still refused."""

    def unsupported(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    record(tmp_path / ".longrnn.lock")
    with caplog.at_level(logging.WARNING), pytest.raises(UserError):
        Lock.of_folder(tmp_path).acquire()
    assert caplog.text
    record(tmp_path / ".longrnn.lock", process_start="1")
    with Lock.of_folder(tmp_path):
        pass


def test_other_errors_of_the_system_are_not_taken_for_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input/output error is reported as such, and leaves no descriptor open."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"):
        Lock.of_folder(tmp_path).acquire()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not locks._held
