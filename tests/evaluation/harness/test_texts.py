"""Documents and scores of our lm-eval tasks."""

from __future__ import annotations

import re
from pathlib import Path

from longrnn.evaluation.harness import texts
from longrnn.text import ByteTokenizer
from tests.texts import trained_bpe

TINY = {"pretrained": "passkey-tiny", "version": 1.0, "config_source": "somewhere"}


def test_passkeys() -> None:
    """Prompts have the requested length, contain their key, and cover all depths."""
    metadata = {**TINY, "max_seq_lengths": [512, "1k"], "n": 3, "depths": 3}
    documents = texts.passkey_documents(metadata)
    assert [d["max_length"] for d in documents] == [512] * 3 + [1024] * 3
    assert [d["depth"] for d in documents] == [0.0, 0.5, 1.0] * 2
    for document in documents:
        (key,) = document["outputs"]
        assert len(ByteTokenizer().encode(document["input"])) == document["max_length"]
        assert document["input"].count(key) == 2
        assert document["input"].endswith("The passkey is")
    assert len({d["outputs"][0] for d in documents[:3]}) == 3


def test_own_text_and_tokenizer(tmp_path: Path) -> None:
    """Words of a file keep their order; lengths count tokens of the given tokenizer."""
    (tmp_path / "book.txt").write_text(" ".join(f"w{i}" for i in range(500)))
    trained_bpe().save(tmp_path)
    for options in (TINY, {"tokenizer": str(tmp_path)}):
        metadata = {**options, "text": str(tmp_path / "book.txt"), "max_seq_lengths": 1000, "n": 1}
        (document,) = texts.passkey_documents(metadata)
        words = [int(word) for word in re.findall(r"w(\d+)", document["input"])]
        assert words == [*range(words[0], words[0] + len(words))]
        assert 940 < document["length"] <= 1000


def test_scores() -> None:
    """An answer is right if it begins with the key."""
    key = {"outputs": ["01234"], "max_length": 512}
    assert texts.score_key(key, [" 01234. And"]) == {"accuracy": 1.0, "512": 1.0}
    assert texts.score_key(key, [" is 01234"])["accuracy"] == 0.0
