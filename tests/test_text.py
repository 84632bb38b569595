"""The byte tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrnn.errors import UserError
from longrnn.text import ByteTokenizer


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
