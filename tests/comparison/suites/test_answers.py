"""The kind `answers` measures what fine-tuning on prompts and answers trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from longrnn.corpus_writer import CorpusWriter

from longrnn.comparison.suites import Answers
from longrnn.errors import UserError
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import generate
from longrnn.text import ByteTokenizer
from tests.comparison.suites.small_models import SHORT, PairTokenizer, points, small_model

Document = list[tuple[list[int], bool]]


def generated(one: OpenCheckpoint, prompt: list[int], tokens: int) -> list[int]:
    return generate(one.model, torch.tensor([prompt]), max_new_tokens=tokens)[0][0]


def documents(one: OpenCheckpoint) -> list[Document]:
    """Prompts and answers in turn, some of them what the model generates."""
    first = [10, 20, 30]
    right = generated(one, first, 4)
    second = [*first, *right, 40, 50]
    return [
        [(first, False), (right, True)],
        [(first, False), (right, True), ([40, 50], False), (generated(one, second, 3), True)],
        [(first, False), (right, True), ([40, 50], False), ([1, 2], True)],
        [([7], True), ([8, 9], False), ([60] * 9, True), ([5], False)],
    ]


def corpus(folder: Path, written: list[Document]) -> str:
    with CorpusWriter(folder, ByteTokenizer(), name="bytes", min_length=2, scored=True) as writer:
        for document in written:
            for ids, is_answer in document:
                writer.write(ids, [is_answer] * len(ids))
            writer.end_document()
        writer.publish(["documents"])
    return str(folder)


def expected(one: OpenCheckpoint, document: Document) -> tuple[float, int, bool]:
    """Loss, number and correctness of answer tokens from one forward pass over the document."""
    ids = torch.tensor([token for part, _ in document for token in part])
    is_answer = torch.tensor([flag for part, flag in document for _ in part])[1:]
    with torch.no_grad():
        logits = one.model(ids[None, :-1]).logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[is_answer]
    right = (logits.argmax(-1) == ids[1:])[is_answer].all()
    return float(nats.sum()), len(nats), bool(right)


def test_losses_and_matches_are_those_of_a_forward_pass(tmp_path: Path) -> None:
    """Every answer is read after all that stands before it; a document is one sample."""
    one, other = small_model("one"), small_model("other", seed=1)
    written = documents(one)
    evaluation = Answers("answers", 0, corpus=corpus(tmp_path / "c", written))
    loss, match = points(evaluation, one, tmp_path / "one.jsonl", other)
    assert loss.metric.name == "answers, nats per token"
    assert match.samples == {"0": 1, "1": 1, "2": 0, "3": 0}
    for number, document in enumerate(written):
        nats, tokens, right = expected(one, document)
        assert loss.samples[str(number)] == (pytest.approx(nats, rel=1e-5), tokens)
        assert match.samples[str(number)] == right
    totals = [sum(column) for column in zip(*loss.samples.values(), strict=True)]
    estimate = loss.metric.estimate(list(loss.samples.values()))
    assert estimate.mean == pytest.approx(totals[0] / totals[1])
    assert match.metric.estimate(list(match.samples.values())).low > 0.05  # Wilson: 2 of 4
    theirs = evaluation.measure(other, tmp_path / "other.jsonl", quiet=True)[0].samples
    assert loss.metric.difference is not None
    paired = loss.metric.difference(list(theirs.values()), list(loss.samples.values()))
    assert paired.mean == pytest.approx(
        (sum(s[0] for s in theirs.values()) - totals[0]) / totals[1]
    )
    assert paired.low < paired.mean < paired.high


def test_documents_may_be_added(tmp_path: Path) -> None:
    """A resumed evaluation measures only what is missing."""
    one, output = small_model("one"), tmp_path / "one.jsonl"
    options: dict[str, Any] = {"corpus": corpus(tmp_path / "c", documents(one))}
    few = points(Answers("answers", 0, n=2, **options), one, output)[0].samples
    before = output.read_bytes()
    assert len(few) == 2
    every = points(Answers("answers", 0, **options), one, output)[0].samples
    assert output.read_bytes().startswith(before)
    assert len(every) == len(output.read_text().splitlines()) - 1 == 4
    assert few.items() <= every.items()


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    """Tokenizers differ, a model is too short, or there are no answers."""
    one = small_model("one")
    folder = corpus(tmp_path / "c", [[([1] * 400, False), ([2], True)], *documents(one)])
    evaluation = Answers("answers", 0, corpus=folder)
    with pytest.raises(UserError, match="different tokenizers.*give models that share one"):
        points(evaluation, one, tmp_path / "x.jsonl", small_model("b", tokenizer=PairTokenizer()))
    short = small_model("short", position=SHORT)
    found = points(evaluation, short, tmp_path / "short.jsonl")
    assert all("at most 300 tokens" in str(point.reason) for point in found)
    with pytest.raises(UserError, match="no corpus at"):
        points(Answers("answers", 0, corpus=str(tmp_path / "d")), one, tmp_path / "x.jsonl")
