"""Documents and scores of our lm-eval tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
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


def test_another_tokenizer(tmp_path: Path) -> None:
    """Lengths count tokens of the given tokenizer and are never exceeded."""
    trained_bpe().save(tmp_path)
    metadata = {"tokenizer": str(tmp_path), "max_seq_lengths": 600, "n": 2}
    for document in [
        *texts.passkey_documents(metadata),
        *texts.needle_documents("multikey", metadata),
        *texts.needle_documents("variables", {**metadata, "max_seq_lengths": 2000}),
    ]:
        size = document["max_length"]
        assert size - 40 < document["length"] <= size


def test_lists() -> None:
    """Worked examples are correct, and all numbers are in the vocabulary."""
    metadata = {**TINY, "n_items": [4, 9], "vocab_size": 1000, "n": 2}
    documents = texts.reverse_documents(metadata)
    assert [d["max_length"] for d in documents] == [4, 4, 9, 9]
    for document in documents:
        lines = document["input"].splitlines()
        lists = [line.split()[1:] for line in lines if line.startswith("List:")]
        said = [line.split()[1:] for line in lines if line.startswith("Backwards:")]
        assert said[:-1] == [items[::-1] for items in lists[:-1]]
        assert said[-1] == []
        assert document["outputs"] == lists[-1][::-1]
        assert all(int(item) < 1000 for items in lists for item in items)


def test_text(tmp_path: Path) -> None:
    """Texts are cut to their length without dividing a character."""
    path = tmp_path / "book.txt"
    path.write_text("äb" * 400)
    metadata = {**TINY, "text": str(path)}
    assert texts.text_documents(metadata)[0]["text"] == "äb" * 400
    cut = texts.text_documents({**metadata, "max_seq_lengths": [100, 1001]})
    assert [len(d["text"].encode()) for d in cut] == [99, 1001]


@pytest.mark.parametrize(
    ("function", "metadata", "message"),
    [
        ("passkey", {"max_seq_length": [512]}, "max_seq_lengths"),
        ("passkey", {"max_seq_lengths": [64]}, "64 is too short"),
        ("passkey", {"max_seq_lengths": "long"}, "long"),
        ("passkey", {"n": 0}, "'n'"),
        ("passkey", {"pretrained": None}, "tokenizer=NAME"),
        ("text", {}, "text=book.txt"),
        ("text", {"text": "missing.txt"}, "missing.txt"),
        ("text", {"text": "{file}", "max_seq_lengths": [4096]}, "4,096"),
    ],
)
def test_bad_metadata(
    function: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("Too short")
    if metadata.get("text") == "{file}":
        metadata = {**metadata, "text": str(tmp_path / "book.txt")}
    with pytest.raises(UserError, match=message):
        getattr(texts, f"{function}_documents")({**TINY, **metadata})


def test_scores() -> None:
    """Scores of known answers: a key at the start, missing numbers, items in another order."""
    key = {"outputs": ["01234"], "max_length": 512}
    assert texts.score_key(key, [" 01234. And"]) == {"accuracy": 1.0, "512": 1.0}
    assert texts.score_key(key, [" is 01234"])["accuracy"] == 0.0
    values = {"outputs": ["11", "22", "33", "44"], "max_length": 512}
    assert texts.score_all(values, ["are 44, 11 and 22."])["accuracy"] == 0.75
    numbers = {"outputs": ["3", "17", "9"], "max_length": 3}
    assert texts.score_list(numbers, [" 3 17 9"])["exact_match"] == 1.0
    moved = texts.score_list(numbers, [" 3 9 17 4"])
    assert moved == {
        "exact_match": 0.0, "item_accuracy": pytest.approx(1 / 3), "edit_distance": 2.0, "3": 0.0
    }  # fmt: skip
    text = {"text": "two wörds", "max_length": 10}
    scores = texts.score_text(text, [-20.0])
    assert scores["bits_per_byte"] == (-20.0, 10)
    assert scores["word_perplexity"] == (-20.0, 2)
    assert scores["10"] == pytest.approx(20 / 10 / 0.6931471805599453)
