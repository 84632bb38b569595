"""Documents and scores of our lm-eval tasks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from longrnn.data.prompts import FILLER
from longrnn.errors import UserError
from longrnn.evaluation.harness import texts
from longrnn.text import ByteTokenizer
from tests.texts import trained_bpe

TINY = {"pretrained": "passkey-tiny", "version": 1.0, "config_source": "somewhere"}
HIDDEN = re.compile(r"One of the special magic numbers for (\S+) is: (\d+)\.")


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


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("single", (1, 1)), ("multikey", (4, 1)), ("multivalue", (4, 4)), ("multiquery", (4, 4))],
)
def test_needles(kind: str, counts: tuple[int, int]) -> None:
    """The numbers of the keys in the question are in the text, and all the rest is filler."""
    documents = texts.needle_documents(kind, {**TINY, "max_seq_lengths": [1024, 3000], "n": 2})
    for document in documents:
        hidden = HIDDEN.findall(document["input"])
        asked = re.search(r"for ([^?]+?) mentioned", document["input"].splitlines()[-1])
        assert asked is not None
        names = asked[1].split(", ")
        assert (len(hidden), len(document["outputs"])) == counts
        assert sorted(document["outputs"]) == sorted(v for key, v in hidden if key in names)
        assert all(name in document["gen_prefix"] for name in names)
        assert document["max_length"] - 40 < document["length"] <= document["max_length"]
        left = " ".join(HIDDEN.sub("", document["input"].split("\n")[1]).split())
        assert (FILLER * 40).startswith(left)
        assert left.endswith(".")
    assert len({d["input"] for d in documents}) == 4
    again = texts.needle_documents(kind, {**TINY, "max_seq_lengths": [1024, 3000], "n": 2})
    assert again == documents


def test_variables() -> None:
    """The assignments are a chain in order, and its names are the answer."""
    metadata = {**TINY, "max_seq_lengths": [2500], "n": 1}
    (document,) = texts.needle_documents("variables", metadata)
    worked, text = document["input"].split("\n\n", 2)[1:]
    assert worked.count("VAR") == 1 + 2 * 4
    value = re.search(r"VAR (\w+) = (\d+)\.", text)
    assert value is not None
    chain = [value[1]]
    for name, before in re.findall(r"VAR (\w+) = VAR (\w+)\.", text[value.end() :]):
        assert before == chain[-1]
        chain.append(name)
    assert chain == document["outputs"]
    assert f"assigned the value {value[2]} in" in text
    assert value[2] in document["gen_prefix"]
    assert 2460 < document["length"] <= 2500


def test_own_text_and_tokenizer(tmp_path: Path) -> None:
    """Words of a file keep their order; lengths count tokens of the given tokenizer."""
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{i}" for i in range(500)))
    metadata = {**TINY, "text": str(path), "max_seq_lengths": [1000], "n": 1}
    for function in (texts.passkey_documents, lambda m: texts.needle_documents("single", m)):
        words = [int(word) for word in re.findall(r"w(\d+)", function(metadata)[0]["input"])]
        assert words == [*range(words[0], words[0] + len(words))]
    with pytest.raises(UserError, match="500"):
        texts.needle_documents("single", {**metadata, "max_seq_lengths": [10_000]})
    trained_bpe().save(tmp_path)
    metadata = {"tokenizer": str(tmp_path), "max_seq_lengths": 2000, "n": 2}
    for document in [
        *texts.passkey_documents(metadata),
        *texts.needle_documents("multikey", metadata),
        *texts.needle_documents("variables", metadata),
    ]:
        assert 1940 < document["length"] <= 2000


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


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"max_seq_length": [512]}, "max_seq_lengths"),
        ({"max_seq_lengths": [64]}, "64 is too short"),
        ({"max_seq_lengths": "long"}, "long"),
        ({"n": 0}, "n"),
        ({"pretrained": None}, "tokenizer=NAME"),
        ({"text": "missing.txt"}, "missing.txt"),
    ],
)
def test_bad_metadata(metadata: dict[str, Any], message: str) -> None:
    """A misspelt name or a value that is not valid is refused."""
    for kind in ("passkey", "needle"):
        arguments = () if kind == "passkey" else ("single",)
        with pytest.raises(UserError, match=message):
            getattr(texts, f"{kind}_documents")(*arguments, {**TINY, **metadata})


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
