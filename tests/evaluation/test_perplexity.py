"""Loss by position equals a direct computation; the criterion of robust forgetting."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.perplexity import STRETCH, edges, evaluate, summarise
from longrnn.evaluation.texts import Document, read_documents
from longrnn.inference import trie
from longrnn.models import LMOutput, RecurrentLM
from longrnn.results import Row
from longrnn.state import LMState
from longrnn.text import ByteTokenizer
from tests.contracts.builders import build_model, random_tokens
from tests.refusals import naming

LENGTH = 150


def document(seed: int, tokens: int) -> Document:
    return Document(f"{seed}.txt", str(seed), random_tokens(1, tokens, seed)[0])


def direct(model: RecurrentLM, tokens: Tensor) -> list[float]:
    """Return the loss at every position of one window, from all logits at once."""
    with torch.no_grad():
        chances = torch.softmax(model(tokens[None, :-1]).logits[0].double(), dim=-1)
    return [-math.log(chances[i, token]) for i, token in enumerate(tokens[1:].tolist())]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("mixer", list(MIXERS))
@pytest.mark.parametrize("piece", [4096, 7])
def test_against_all_logits_at_once(
    mixer: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses by bucket and stretch equal those computed from all logits at once."""
    monkeypatch.setattr(trie, "SCORED_TOKENS", piece)
    model = build_model(mixer, position="sinusoidal")
    documents = [document(1, 2 * LENGTH + 1), document(2, LENGTH + 1), document(3, 2 * LENGTH)]
    rows = evaluate(
        model, documents, length=LENGTH, output=tmp_path / "r.jsonl", batch_size=3, quiet=True
    )
    assert [(row["text"], row["window"]) for row in rows] == [
        ("1.txt", 0),
        ("1.txt", 1),
        ("2.txt", 0),
        ("3.txt", 0),
    ]
    for row in rows:
        start = row["window"] * LENGTH
        tokens = documents[int(row["text_sha256"]) - 1].tokens[start : start + LENGTH + 1]
        expected = direct(model, tokens)
        assert row["nats_per_token"] == pytest.approx(mean(expected), rel=1e-12)
        bounds = [0, 1, 2, 4, 8, 16, 32, 64, 128, 150]
        assert edges(LENGTH) == bounds
        for found, (low, high) in zip(row["buckets"], pairwise(bounds), strict=True):
            assert found == pytest.approx(mean(expected[low:high]), rel=1e-12)
        for found, low in zip(row["stretches"], (0, 64, 128), strict=True):
            assert found == pytest.approx(mean(expected[low : low + STRETCH]), abs=1e-6)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (4, [0, 1, 2, 4]), (5, [0, 1, 2, 4, 5])],
)
def test_edges(length: int, expected: list[int], tmp_path: Path) -> None:
    """Buckets partition every window, down to a single token."""
    assert edges(length) == expected
    model = build_model("gru")
    output = tmp_path / "r.jsonl"
    (row,) = evaluate(model, [document(0, length + 1)], length=length, output=output, quiet=True)
    assert len(row["buckets"]) == len(expected) - 1


class Counting:
    """A uniform model that records the sizes of its calls and may be interrupted."""

    vocab_size = 1000
    max_length = None

    def __init__(self, fails_after: int = 1000) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fails_after = fails_after

    def fingerprint(self) -> str:
        return "counting"

    def init_state(self, batch_size: int) -> LMState:
        return LMState(torch.zeros(batch_size, dtype=torch.long), ())

    def __call__(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        if len(self.calls) == self.fails_after:
            raise KeyboardInterrupt
        assert state is not None
        self.calls.append((tokens.shape[0], tokens.shape[1]))
        return LMOutput(torch.zeros(*tokens.shape, self.vocab_size), state)


def test_logits_never_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call gets at most a fixed number of tokens and keeps only the logits of one piece."""
    monkeypatch.setattr(trie, "CALL_LOGITS", 100_000)
    model = Counting()
    evaluate(model, [document(0, 2001)], length=1000, output=tmp_path / "r.jsonl", quiet=True)
    assert sum(rows * tokens for rows, tokens in model.calls) == 2000
    assert max(rows * tokens for rows, tokens in model.calls) <= 100


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """A resumed evaluation measures only missing windows; results of another run are refused."""
    output = tmp_path / "r.jsonl"
    asked: dict[str, Any] = {"length": 100, "output": output, "batch_size": 1, "quiet": True}
    texts = [document(0, 201), document(1, 101)]
    with pytest.raises(KeyboardInterrupt):
        evaluate(Counting(fails_after=2), texts, **asked)
    before = output.read_text()
    model = Counting()
    rows = evaluate(model, texts, **asked)
    assert len(model.calls) == 1
    assert output.read_text().startswith(before)
    assert len(rows) == 3
    # A new text and another length are added; what is there is not asked again.
    model = Counting()
    evaluate(model, [*texts, document(2, 101)], **asked)
    evaluate(model, texts[:1], **{**asked, "length": 50})
    assert len(model.calls) == 1 + 4
    assert evaluate(Counting(), texts, **asked) == rows
    with pytest.raises(UserError, match="model"):
        evaluate(build_model("gru"), texts, **asked)
    with pytest.raises(UserError, match="tokenizer"):
        evaluate(Counting(), [texts[0]._replace(tokenizer="another")], **asked)
    with pytest.raises(UserError, match="batch"):
        evaluate(Counting(), texts, **{**asked, "batch_size": 0})


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    """A text that is shorter than a window raises a UserError."""
    with pytest.raises(UserError, match=naming("0.txt", 101)):
        evaluate(Counting(), [document(0, 100)], length=100, output=tmp_path / "r", quiet=True)
    assert not list(tmp_path.iterdir())


def row(nats: list[float], *, length: int | None = None, bytes_per_token: int = 1) -> Row:
    """Return a row with these losses by stretch."""
    length = length or STRETCH * len(nats)
    bounds = edges(length)
    return {
        "length": length,
        "bytes": bytes_per_token * length,
        "bucket_bytes": [bytes_per_token * (b - a) for a, b in pairwise(bounds)],
        "nats_per_token": mean(nats),
        "buckets": [mean(nats)] * (len(bounds) - 1),
        "stretches": nats,
    }


def test_intervals_over_windows() -> None:
    """Intervals are over windows, and a single window has none."""
    from scipy import stats

    rows = [row([1.0]), row([2.0]), row([4.0], bytes_per_token=4)]
    whole, buckets = summarise(rows)
    expected = stats.ttest_1samp([1, 2, 4], 0).confidence_interval()
    assert whole.nats.mean == pytest.approx(7 / 3)
    assert (whole.nats.low, whole.nats.high) == pytest.approx((expected.low, expected.high))
    assert whole.bits is not None
    assert whole.bits.mean == pytest.approx((1 + 2 + 4) / (1 + 1 + 4) / math.log(2))
    assert [(b.start, b.stop) for b in buckets] == list(pairwise(edges(STRETCH)))
    assert buckets[3].nats == whole.nats
    alone, _ = summarise(rows[:1])
    assert alone.nats.n == 1
    assert math.isinf(alone.nats.high)


def test_rows_of_an_earlier_version_get_the_bytes_of_their_buckets(tmp_path: Path) -> None:
    """Rows without `bucket_bytes` are read as they are, and nothing is measured again."""
    (tmp_path / "a.txt").write_text("0123456789" * 30)
    texts = read_documents(
        [tmp_path / "a.txt"], ByteTokenizer(), build_model("gru", vocab_size=256)
    )
    asked: dict[str, Any] = {"length": 100, "output": tmp_path / "r.jsonl", "quiet": True}
    rows = evaluate(Counting(), texts, **asked)
    assert rows[0]["bucket_bytes"] == [b - a for a, b in pairwise(edges(100))]
    lines = [json.loads(line) for line in asked["output"].read_text().splitlines()]
    for line in lines:
        line.pop("bucket_bytes", None)
        del line["sha256"]
    asked["output"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    unused = Counting()
    assert evaluate(unused, texts, **asked) == rows
    assert unused.calls == []


def test_bits_are_unknown_without_bytes(tmp_path: Path) -> None:
    """There are no bits per byte for a tokenizer without byte offsets."""
    rows = evaluate(Counting(), [document(0, 101)], length=100, output=tmp_path / "r", quiet=True)
    whole, buckets = summarise(rows)
    assert whole.bits is None
    assert all(bucket.bits is None for bucket in buckets)


def test_forgetting() -> None:
    """The bound is twice the largest loss inside, and nothing beyond gives no criterion."""
    found = forgetting([row([3.0, 1.0, 2.0, 5.9])], train_length=128)
    assert found == (True, 64, 3.0, 0, 5.9, 192)
    found = forgetting([row([3.0, 1.0, 2.0, 6.1])], train_length=128)
    assert found == (False, 64, 3.0, 0, 6.1, 192)
    # What is compared is the mean over windows.
    found = forgetting([row([3.0, 1.0, 2.0, 6.1]), row([3.0, 1.0, 2.0, 1.0])], train_length=128)
    assert found is not None
    assert found.robust
    # A training length below one stretch counts as one; one that is not passed cannot be judged.
    found = forgetting([row([1.0, 3.0])], train_length=20)
    assert found == (False, 64, 1.0, 0, 3.0, 64)
    assert forgetting([row([1.0, 3.0])], train_length=128) is None
    assert forgetting([row([1.0], length=60)], train_length=20) is None


def test_forgetting_is_judged_on_wide_stretches() -> None:
    """Short loss peaks do not decide for long training lengths; a short last stretch is merged."""
    calm, length = [1.0] * 64, 4096
    odd = [*calm[:40], 4.0, *calm[41:]]
    found = forgetting([row(odd, length=length)], train_length=2048)
    assert found == (True, 256, 1.0, 0, 1.75, 2560)
    lasting = [*calm[:40], *[4.0] * 4, *calm[44:]]
    found = forgetting([row(lasting, length=length)], train_length=2048)
    assert found == (False, 256, 1.0, 0, 4.0, 2560)
    found = forgetting([row([*calm, 4.0], length=length + 1)], train_length=2048)
    assert found is not None
    assert found.beyond == pytest.approx(1 + 3 / 257)


def test_a_loss_that_is_no_number_is_not_robust() -> None:
    """NaN counts as an infinite loss."""
    found = forgetting([row([1.0, math.nan, 1.0])], train_length=64)
    assert found is not None
    assert not found.robust
    found = forgetting([row([math.nan, 1.0, 1.0])], train_length=64)
    assert found is not None
    assert not found.robust


def test_rows_of_an_earlier_version_are_measured_again(tmp_path: Path) -> None:
    """Rows without bytes are measured again."""
    output = tmp_path / "r.jsonl"
    asked: dict[str, Any] = {"length": 100, "output": output, "batch_size": 1, "quiet": True}
    rows = evaluate(Counting(), [document(0, 201)], **asked)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for line in lines[1:]:
        del line["bytes"], line["start"]
    for line in lines:
        del line["sha256"]
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = Counting()
    assert evaluate(model, [document(0, 201)], **asked) == rows
    assert len(model.calls) == 2


class TwoBytes(ByteTokenizer):
    """A tokenizer with one id for each pair of bytes."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text)[::2]

    def byte_ends(self, text: str) -> list[int] | None:
        n = len(text.encode())
        return [min(end, n) for end in range(2, n + 2, 2)]


def test_documents(tmp_path: Path) -> None:
    """The SHA-256 is that of the file, and line ends are kept."""
    import hashlib

    model = build_model("gru", vocab_size=256)
    (tmp_path / "a.txt").write_bytes("a\r\nü\n".encode())
    (a,) = read_documents([tmp_path / "a.txt"], ByteTokenizer(), model)
    assert a.name == "a.txt"
    assert a.tokens.tolist() == list(b"a\r\n\xc3\xbc\n")
    assert a.sha256 == hashlib.sha256(b"a\r\n\xc3\xbc\n").hexdigest()
    (b,) = read_documents([tmp_path / "a.txt"], TwoBytes(), model)
    assert a.byte_ends is not None
    assert b.byte_ends is not None
    assert a.byte_ends.tolist() == [1, 2, 3, 4, 5, 6]
    assert b.byte_ends.tolist() == [2, 4, 6]


def test_texts_that_do_not_belong_together(tmp_path: Path) -> None:
    """Duplicate texts and tokenizers of other models raise a UserError."""
    model = build_model("gru", vocab_size=256)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same")
    with pytest.raises(UserError, match=naming("a.txt", "b.txt")):
        read_documents([tmp_path / "a.txt", tmp_path / "b.txt"], ByteTokenizer(), model)
    with pytest.raises(UserError, match=naming(256, 11)):
        read_documents([tmp_path / "a.txt"], ByteTokenizer(), build_model("gru"))
