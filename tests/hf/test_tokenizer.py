"""Tokenizers load by name or path, or are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load_tokenizer
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
    """A folder and the `tokenizer.json` inside it give the same ids."""
    for path in (saved, saved / "tokenizer.json", str(saved)):
        tokenizer = load_tokenizer(path)
        assert isinstance(tokenizer, HFTokenizer)
        assert tokenizer.vocab_size == trained_bpe().vocab_size
        assert tokenizer.encode(TEXT) == trained_bpe().encode(TEXT)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


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


def test_fingerprints_identify_tokenizers(tmp_path: Path) -> None:
    """A saved tokenizer keeps its fingerprint; other merges give another fingerprint."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    def small(merges: list[tuple[str, str]]) -> HFTokenizer:
        vocab = {"a": 0, "b": 1, "ab": 2, "ba": 3}
        fast = Fast(BPE(vocab=vocab, merges=merges))
        return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))

    one, other = small([("a", "b"), ("b", "a")]), small([("b", "a"), ("a", "b")])
    assert one.encode("aba") != other.encode("aba")
    assert one.fingerprint() == small([("a", "b"), ("b", "a")]).fingerprint()
    assert len({one.fingerprint(), other.fingerprint(), ByteTokenizer().fingerprint()}) == 3
    one.save(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(place).fingerprint() == one.fingerprint()
