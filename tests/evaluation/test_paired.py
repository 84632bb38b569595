"""Two models on the same bytes: shared windows, and intervals of a difference."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from longrnn.errors import UserError
from longrnn.evaluation.paired import LEAST, bits_per_byte, by_position
from longrnn.evaluation.perplexity import evaluate, evaluate_windows
from longrnn.evaluation.texts import Document, read_documents
from longrnn.evaluation.windows import shared_windows, windows
from longrnn.hf.tokenizer import HFTokenizer
from longrnn.intervals import ratio
from longrnn.results import Row
from longrnn.text import ByteTokenizer
from tests.contracts.builders import build_model
from tests.texts import trained_bpe

TEXT = "Ünïcödé: the grass is green, 你好! There and back again.\n\n  The sky is blue. " * 12


def documents(tmp_path: Path, count: int = 1) -> list[list[Document]]:
    """Return texts as bytes and as tokens of a BPE."""
    paths = []
    for number in range(count):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(f"{number}: {TEXT}")
    bpe = trained_bpe()
    wide = build_model("gru", vocab_size=max(256, bpe.vocab_size))
    return [read_documents(paths, tokenizer, wide) for tokenizer in (ByteTokenizer(), bpe)]


def predicted(document: Document, start: int, stop: int) -> bytes:
    """Return the bytes of the tokens start + 1 … stop."""
    ends = document.byte_ends
    assert ends is not None
    return TEXT_BYTES[document.name][int(ends[start]) : int(ends[stop])]


TEXT_BYTES = {f"{number}.txt": f"{number}: {TEXT}".encode() for number in range(6)}


def test_byte_ends_of_a_bpe() -> None:
    """Byte offsets cover the text, also for characters of several bytes and leading spaces."""
    bpe = trained_bpe()
    assert isinstance(bpe, HFTokenizer)
    ends, ids = bpe.byte_ends(TEXT), bpe.encode(TEXT)
    assert ends is not None
    assert len(ends) == len(ids)
    assert ends[-1] == len(TEXT.encode())
    assert ends == sorted(ends)
    for index in (0, 3, 10, len(ids) - 1):
        text = bpe.decode(ids[: index + 1])
        if not text.endswith("\ufffd"):
            assert TEXT.encode()[: ends[index]] == text.encode()
    assert bpe.byte_ends("") == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("length", [50, 97])
def test_windows_of_two_tokenizers(order: tuple[int, int], length: int, tmp_path: Path) -> None:
    """Shared windows predict the same bytes for both models, without gaps and overlaps."""
    texts = [documents(tmp_path, 2)[i] for i in order]
    first, second = shared_windows(texts, length)
    assert len(first) == len(second) == sum(len(windows(text, length)) for text in texts[0])
    for one, other in zip(first, second, strict=True):
        assert one.document.name == other.document.name
        assert one.n_bytes() == other.n_bytes()
        assert predicted(one.document, one.start, one.start + one.length) == predicted(
            other.document, other.start, other.start + other.length
        )
        assert abs(one.length - length) < 20
    for before, after in pairwise(first):
        if before.document is after.document:
            assert after.start == before.start + before.length


def test_windows_of_one_tokenizer(tmp_path: Path) -> None:
    """Models with one tokenizer are measured in the windows of a single model."""
    texts = documents(tmp_path, 2)[1]
    once = [window for text in texts for window in windows(text, 40)]
    assert shared_windows([texts, list(texts)], 40) == [once, once]
    unknown = [text._replace(byte_ends=None) for text in texts]
    assert shared_windows([unknown, list(unknown)], 40)[0][1].n_bytes() is None
    bytes_, _ = documents(tmp_path, 2)
    with pytest.raises(UserError):
        shared_windows([unknown, bytes_], 40)
    with pytest.raises(UserError):
        shared_windows(documents(tmp_path), 1)
    with pytest.raises(UserError, match="--length"):
        shared_windows(documents(tmp_path), 100_000)


def test_bits_per_byte_of_two_tokenizers(tmp_path: Path) -> None:
    """Bits per byte are the loss of all tokens of a text over its bytes."""
    texts = documents(tmp_path)
    models = [build_model("gru", vocab_size=300), build_model("lstm", vocab_size=5000)]
    rows = []
    for model, wanted, name in zip(models, shared_windows(texts, 60), "ab", strict=True):
        output = tmp_path / f"{name}.jsonl"
        rows.append(evaluate_windows(model, wanted, output=output, batch_size=4, quiet=True))
    found = bits_per_byte(*rows)
    for mean, model, one in zip((found.first, found.second), models, texts, strict=True):
        measured = rows[0] if model is models[0] else rows[1]
        bits = 0.0
        for row in measured:
            piece = one[0].tokens[row["start"] : row["start"] + row["length"] + 1][None]
            with torch.no_grad():
                chances = torch.log_softmax(model(piece[:, :-1]).logits.double(), -1)
            bits -= float(chances.gather(-1, piece[:, 1:, None]).sum()) / math.log(2)
        assert mean == pytest.approx(bits / sum(row["bytes"] for row in measured), rel=1e-9)
    assert found.estimate.mean == pytest.approx(found.second - found.first)
    assert found.unit == "windows"


def row(nats: float, *, text: int = 0, window: int = 0, n_bytes: int | None = 64) -> Row:
    return {
        "text": f"{text}.txt", "text_sha256": str(text), "window": window, "length": 64,
        "bytes": n_bytes, "nats_per_token": nats, "buckets": [nats + k for k in range(7)],
    }  # fmt: skip


def test_texts_are_drawn_whole() -> None:
    """With several texts the interval is over texts, and with few texts over windows."""
    first = [row(1.0, text=t, window=w) for t in range(6) for w in range(20)]
    second = [row(1.0 + t / 10, text=t, window=w) for t in range(6) for w in range(20)]
    found = bits_per_byte(first, second)
    assert (found.unit, found.estimate.n) == ("texts", 6)
    assert found.basis() == "bootstrap over 6 texts"
    assert found.estimate.mean == pytest.approx(0.25 / math.log(2))
    assert found.estimate.high - found.estimate.low > 0.2
    # Too few texts: their windows are drawn, and it is said.
    few = bits_per_byte(first[:80], second[:80])
    assert (few.unit, few.estimate.n) == ("windows", 80)
    assert "of these texts alone" in few.basis()
    assert few.estimate.high - few.estimate.low < 0.08
    none = bits_per_byte(first[: LEAST - 1], second[: LEAST - 1])
    assert none.unit == "none"
    assert math.isinf(none.estimate.high)


def test_by_position() -> None:
    """The difference by position compares equal buckets."""
    found = by_position([row(1.0)] * 5, [row(1.5), *[row(1.25)] * 4])
    assert [(d.first, d.estimate.mean) for d in found] == [
        (1.0 + k, pytest.approx(0.3)) for k in range(7)
    ]


def test_other_texts_are_refused() -> None:
    """Rows of different texts, or without bytes, raise a UserError."""
    with pytest.raises(UserError):
        bits_per_byte([row(1.0)], [row(1.0, text=1)])
    with pytest.raises(UserError):
        bits_per_byte([row(1.0)], [row(1.0, n_bytes=63)])
    with pytest.raises(UserError):
        bits_per_byte([row(1.0, n_bytes=None)], [row(1.0, n_bytes=None)])


def test_ratio() -> None:
    """The interval is that of the ratio and is the same for every call."""
    draws = np.random.default_rng(3)
    top = draws.normal(3.0, 1.0, 400).tolist()
    found = ratio(top, [2.0] * 400)
    assert found.mean == pytest.approx(sum(top) / 800)
    half = 1.96 * float(np.std(top)) / 20 / 2
    assert found.low == pytest.approx(found.mean - half, abs=0.005)
    assert found.high == pytest.approx(found.mean + half, abs=0.005)
    assert ratio(top, [2.0] * 400) == found
    assert ratio([0.0] * 9, [1.0] * 9)[:3] == (0, 0, 0)
    assert math.isinf(ratio([1.0], [2.0]).high)


def test_windows_are_those_of_one_model(tmp_path: Path) -> None:
    """A comparison reuses the rows that were measured for a model alone."""
    texts = documents(tmp_path)[0]
    model, output = build_model("gru", vocab_size=256), tmp_path / "r.jsonl"
    rows = evaluate(model, texts, length=60, output=output, quiet=True)
    wanted = shared_windows([texts, texts], 60)[0]
    before = output.read_bytes()
    assert evaluate_windows(model, wanted, output=output, quiet=True) == rows
    assert output.read_bytes() == before
