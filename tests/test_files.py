"""Atomic writes: a reader sees the old file or the new one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from longrnn.files import file_name, write_atomic

pytestmark = pytest.mark.core


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", ["größer\n", "", b"\x00\xff"])
def test_write(tmp_path: Path, content: str | bytes) -> None:
    """Text (UTF-8) and bytes, folders made on the way; nothing is left beside, or of the old."""
    path = tmp_path / "a" / "b" / "file"
    write_atomic(path, "a long line of text")
    write_atomic(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failure_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A failure on the way leaves the old content and no half-written file, and names the file."""
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="disk full") as failure:
        write_atomic(path, "new")
    assert failure.value.filename == str(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_content_is_on_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synced, then renamed, then the folder synced: the order that survives a power cut."""
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("rename"), replace(*paths)))
    write_atomic(tmp_path / "file", "x")
    assert order == ["sync", "rename", "sync"]


def test_every_text_has_a_file_name_of_its_own(tmp_path: Path) -> None:
    """Any text becomes one short file name inside its folder, and no two the same."""
    texts = ["", ".", "..", "...", "a/b", "a_b", "/etc", "con", "CON.txt", "x" * 300, "x" * 301,
             "ü" * 200, "a b", "passkey-tiny+sliding_window(window=50)", "seed=1,n=2"]  # fmt: skip
    names = [file_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    for name in names:
        path = tmp_path / name
        path.write_text("")
        assert path.resolve().parent == tmp_path.resolve()
        assert len(name.encode()) < 120
    assert names[-2:] == texts[-2:]
