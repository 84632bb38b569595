"""The byte tokenizer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longrnn.text import ByteTokenizer


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    """An encoding other than UTF-8, or special tokens added on the way."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_one_id_a_byte() -> None:
    """Characters instead of bytes."""
    assert ByteTokenizer().encode("aé") == [97, 195, 169]
    assert ByteTokenizer().vocab_size == 256


def test_any_ids_decode() -> None:
    """A model's nonsense that raises while it is shown."""
    assert ByteTokenizer().decode([97, 255, 98]) == "a\ufffdb"
    assert ByteTokenizer().decode([]) == ""
