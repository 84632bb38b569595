"""The byte tokenizer, and text files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrnn.errors import UserError
from longrnn.text import ByteTokenizer, parse_yaml, read_text, yaml_text


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    """Decoding the UTF-8 bytes of a text gives the text; no special tokens are added."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size == 256 for i in ids)
    assert tokenizer.decode([97, 255, 300, 98]) == "a\ufffd\ufffdb", "any ids can be decoded"
    assert list(tokenizer.byte_ends("né") or []) == [1, 2, 3]
    with pytest.raises(UserError, match="UTF-8"):
        tokenizer.encode("a\udcff")


def test_a_text_file(tmp_path: Path) -> None:
    """The text is returned without a byte-order mark, with the SHA-256 of the file's bytes."""
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


@pytest.mark.parametrize("value", ["12e4567890123456", "1e5", "true", "3", 1e-05, 12.0, None])
def test_what_is_written_as_yaml_is_read_again(value: object) -> None:
    """A fingerprint that looks like a number stays a text."""
    assert parse_yaml(yaml_text({"fingerprint": value})) == {"fingerprint": value}
    assert parse_yaml("1e3-run") == "1e3-run"
