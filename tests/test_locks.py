"""Locks: one process writes, whoever is killed leaves nothing, and the owner is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.locks import Lock, release_all
from tests.holders import HOLD, holder
from tests.refusals import naming

RACE = """
import sys, time
from pathlib import Path
from longrnn.errors import UserError
from longrnn.locks import Lock
folder, place = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(200):
    try:
        with Lock.of_folder(folder):
            place.mkdir()  # fails where another process is in here
            place.rmdir()
    except UserError:
        time.sleep(0.001)
"""


def start(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_owner_is_named_and_a_killed_one_has_no_lock(tmp_path: Path) -> None:
    """A second process is refused with the first one's id, command and the remedy."""
    owner = holder(tmp_path / "run")
    lock = Lock.of_folder(tmp_path / "run", instead="choose another output_dir")
    try:
        names = [tmp_path / "run", owner.pid, "choose another output_dir"]
        with pytest.raises(UserError, match=naming(*names)) as refusal:
            lock.acquire()
        assert "\n" not in str(refusal.value)
        owner.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        with pytest.raises(UserError):
            lock.acquire()
    finally:
        owner.kill()
        owner.communicate()
    with lock:
        assert (tmp_path / "run").is_dir()


def test_processes_never_hold_a_lock_together(tmp_path: Path) -> None:
    """Of many processes that want a lock at once, one has it at a time."""
    racers = [start(RACE, tmp_path / "run", tmp_path / "inside") for _ in range(4)]
    for racer in racers:
        _, err = racer.communicate()
        assert racer.returncode == 0, err


def test_what_a_lock_leaves(tmp_path: Path) -> None:
    """Folders that were made for a lock go with it, unless something is in them."""
    lock = Lock.of_folder(tmp_path / "a/b")
    with lock:
        assert (tmp_path / "a/b").is_dir()
    assert os.listdir(tmp_path) == []
    with lock:
        (tmp_path / "a/b/file").write_text("x")
    assert os.listdir(tmp_path / "a/b") == ["file"]
    beside = Lock.of_file(tmp_path / "results.jsonl")
    beside.acquire()
    beside.acquire()
    release_all()
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_process_may_take_its_lock_twice(tmp_path: Path) -> None:
    """A command that holds a folder may call another that locks it."""
    one, two = Lock.of_folder(tmp_path / "run"), Lock.of_folder(tmp_path / "run")
    with one, two:
        pass
    with one:
        with two:
            pass
        other = start(HOLD, "folder", tmp_path / "run")
        _, err = other.communicate()
        assert other.returncode == 1
        assert "being written by another process" in err
