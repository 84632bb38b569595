"""Atomic writes, where a reader sees the old file or the new one, and reading of regular files."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.files import (
    append,
    file_name,
    new_folder,
    read_bytes,
    read_json,
    read_text,
    sha256,
    write_atomic,
)

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


def test_what_stands_in_the_place_of_a_partial_file_is_not_followed(tmp_path: Path) -> None:
    """A link there is replaced, and the file or folder that it points to is left alone."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("kept")
    (tmp_path / ".report.partial").symlink_to("victim/file")
    write_atomic(tmp_path / "report", "new")
    (tmp_path / ".folder.partial").symlink_to("victim")
    new_folder(tmp_path / ".folder.partial")
    assert not (tmp_path / ".folder.partial").is_symlink()
    assert (tmp_path / "report").read_text() == "new"
    assert (tmp_path / "victim/file").read_text() == "kept"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_opened_or_replaced(tmp_path: Path, kind: str) -> None:
    """A pipe without a writer and an endless device are refused at once, and stay."""
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    before = path.lstat()
    for use in (
        read_bytes,
        sha256,
        lambda path: append(path, b"x"),
        lambda path: write_atomic(path, "x"),
    ):
        with pytest.raises(OSError, match=path.name):
            use(path)
    for use in (read_json, read_text):
        with pytest.raises(UserError, match=path.name):
            use(path)
    assert path.lstat().st_ino == before.st_ino


def test_a_text_file(tmp_path: Path) -> None:
    for mark in ("", "\ufeff"):
        content = f"{mark}a\r\nü\n".encode()
        (tmp_path / "a.txt").write_bytes(content)
        assert read_text(tmp_path / "a.txt") == ("a\r\nü\n", hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("content", [None, b"", b"\xef\xbb\xbf", b"ab\x00c", b"abc\xff"], ids=str)
def test_files_that_are_not_texts(content: bytes | None, tmp_path: Path) -> None:
    """A missing, empty or binary file is refused by its name, and so is a folder."""
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(UserError, match=path.name):
            read_text(path)
