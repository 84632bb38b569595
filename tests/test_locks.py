"""Locks: one process writes, whoever is killed leaves nothing, and the owner is named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.locks import hold, locked, release_all
from tests.holders import HOLD, holder
from tests.refusals import naming

RACE = """
import sys, time
from pathlib import Path
from longrnn.errors import UserError
from longrnn.locks import locked
folder, place = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(200):
    try:
        with locked(folder):
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
    run, instead = tmp_path / "run", "choose another output_dir"
    try:
        names = [run, owner.pid, instead]
        with pytest.raises(UserError, match=naming(*names)) as refusal:
            hold(run, instead=instead)
        assert "\n" not in str(refusal.value)
        owner.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        with pytest.raises(UserError):
            hold(run)
    finally:
        owner.kill()
        owner.communicate()
    with locked(run):
        pass


def test_processes_never_hold_a_lock_together(tmp_path: Path) -> None:
    racers = [start(RACE, tmp_path / "run", tmp_path / "inside") for _ in range(4)]
    for racer in racers:
        _, err = racer.communicate()
        assert racer.returncode == 0, err


def test_what_a_lock_leaves(tmp_path: Path) -> None:
    """The lock file goes, and folders that were made for it, unless something is in them."""
    with locked(tmp_path / "a/b"):
        assert os.listdir(tmp_path / "a") == [".b.lock"]
    assert os.listdir(tmp_path) == []
    hold(tmp_path / "a/b")
    hold(tmp_path / "a/b")
    (tmp_path / "a/b").write_text("x")
    release_all()
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_process_may_take_its_lock_twice(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        with locked(tmp_path / "run"):
            pass
        other = start(HOLD, tmp_path / "run")
        _, err = other.communicate()
        assert other.returncode == 1
        assert "being written by another process" in err


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """The file that it points to keeps its content."""
    (tmp_path / "victim").write_text("kept")
    (tmp_path / ".out.lock").symlink_to("victim")
    with pytest.raises(UserError, match="link"), locked(tmp_path / "out"):
        pass
    assert (tmp_path / "victim").read_text() == "kept"
