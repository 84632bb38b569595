"""Tokenizers load by name or path, or are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from longrnn import load_tokenizer
from longrnn.errors import UserError
from longrnn.hf.tokenizer import HFTokenizer
from longrnn.models.checkpoint import save_model
from longrnn.text import ByteTokenizer
from tests.contracts.builders import build_model
from tests.texts import trained_bpe

TEXT = "The passkey is 12345. Remember it. <s> naïve  \n"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a tokenizer folder as transformers writes it."""
    bpe: Any = trained_bpe()
    bpe.tokenizer.save_pretrained(tmp_path / "bpe")
    return tmp_path / "bpe"


def test_a_folder_and_its_file_give_the_same_tokenizer(saved: Path) -> None:
    """The same ids, and an error for text from a command line with bytes that are not UTF-8."""
    for path in (saved, saved / "tokenizer.json", str(saved)):
        tokenizer = load_tokenizer(path)
        assert isinstance(tokenizer, HFTokenizer)
        assert tokenizer.vocab_size == trained_bpe().vocab_size
        assert tokenizer.encode(TEXT) == trained_bpe().encode(TEXT)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        with pytest.raises(UserError, match="UTF-8"):
            tokenizer.encode("a\udcff")


def test_a_checkpoint_gives_its_own_tokenizer(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer that a checkpoint records is loaded without a warning, wherever it is."""
    logging.getLogger("transformers").addHandler(caplog.handler)
    model = build_model("lstm", dtype=torch.float32)
    save_model(model, tmp_path / "bytes")
    assert isinstance(load_tokenizer(tmp_path / "bytes"), ByteTokenizer)
    save_model(model, tmp_path / "beside", tokenizer="../bpe")
    assert load_tokenizer(tmp_path / "beside").encode(TEXT) == trained_bpe().encode(TEXT)
    save_model(model, tmp_path / "inside", tokenizer="tokenizer.json")
    tokenizer = load_tokenizer(saved)
    assert isinstance(tokenizer, HFTokenizer)
    tokenizer.save(tmp_path / "inside")
    assert load_tokenizer(tmp_path / "inside").encode(TEXT) == trained_bpe().encode(TEXT)
    assert caplog.messages == []
    logging.getLogger("transformers").removeHandler(caplog.handler)


def small(merges: list[tuple[str, str]], **parts: Any) -> HFTokenizer:
    fast = Fast(BPE(vocab={"a": 0, "b": 1, "ab": 2, "ba": 3, "▁": 4, "\n": 5}, merges=merges))
    for name, part in parts.items():
        setattr(fast, name, part)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def test_byte_ends_rise_to_the_end_of_the_text() -> None:
    """Also where the library trims the offsets of whitespace, and for text without a token."""
    trims = {"post_processor": processors.ByteLevel(trim_offsets=True)}
    tokenizer = small([], pre_tokenizer=pre_tokenizers.Metaspace(), **trims)
    assert tokenizer.byte_ends("\na é") == [1, 1, 2, 5]


def test_fingerprints_identify_tokenizers(tmp_path: Path) -> None:
    """A saved tokenizer keeps its fingerprint; other merges or normalizers give another one."""
    one, other = small([("a", "b"), ("b", "a")]), small([("b", "a"), ("a", "b")])
    assert one.encode("aba") != other.encode("aba")
    assert one.fingerprint() == small([("a", "b"), ("b", "a")]).fingerprint()
    lower = small([("a", "b"), ("b", "a")], normalizer=normalizers.Lowercase())
    assert len({each.fingerprint() for each in (one, other, lower, ByteTokenizer())}) == 4
    one.save(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(place).fingerprint() == one.fingerprint()
