"""The instruct task: targets are the tokens of answers, each of the same weight."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from longrnn.errors import UserError
from longrnn.tasks import Batch, Instruct, Text
from longrnn.tasks.base import UNSCORED
from tests.refusals import naming
from tests.tasks.corpora import instruct_corpus, text_corpus
from tests.tasks.drawings import drawing

HOW = {"n_streams": 2, "length": 16, "seed": 0}
PAIRS = [(f"q{k}" * (1 + k % 3), f"answer{k}"[: 3 + k % 7]) for k in range(40)]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return instruct_corpus(tmp_path / "corpus", PAIRS)


def documents(batch: Batch) -> list[tuple[str, str]]:
    """(prompt, answer) of every document of a batch of whole documents."""
    found = []
    for row in range(len(batch.tokens)):
        real = len(batch.tokens[row]) if batch.is_token is None else int(batch.is_token[row].sum())
        starts = [*batch.is_document_start[row].nonzero()[:, 0].tolist(), real]
        for start, stop in pairwise(starts):
            ids = [*batch.tokens[row, start:stop].tolist()]
            wanted = batch.targets[row, start:stop]
            answer = [int(x) for x in wanted if x != UNSCORED]
            text = bytes([*ids, answer[-1]]).decode()
            assert text.endswith(bytes(answer).decode())
            found.append((text[: -len(answer)], bytes(answer).decode()))
    return found


def test_drawing(tmp_path: Path) -> None:
    """The docstring's drawing is what `sample` makes."""
    rows = drawing(Instruct)
    task = Instruct(corpus=instruct_corpus(tmp_path / "c", [("2+2=", "4")]))
    batch = task.sample(1, length=4, generator=torch.Generator())
    assert "".join(rows["tokens"]) == bytes(batch.tokens[0].tolist()).decode()
    shown = ["." if x == UNSCORED else chr(x) for x in batch.targets[0].tolist()]
    assert rows["targets"] == shown


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_holds_every_document_once(corpus: str, packing: bool) -> None:
    """Rows of one epoch hold each prompt with its answer once; padding is marked."""
    task = Instruct(corpus=corpus, packing=packing)
    layout = task._rows(2, 16, 0)
    found = []
    for stream in range(2):
        for step in range(layout.epochs[stream]):
            batch = task.whole_documents([stream], step, **HOW)
            found += documents(batch)
            if batch.is_token is not None:
                assert (batch.targets[~batch.is_token] == UNSCORED).all()
    assert sorted(found) == sorted(PAIRS)
    assert "40 documents in" in task.whole_layout(**HOW)


def test_rows_of_a_sample_are_different_documents(corpus: str) -> None:
    """Validation reads as many documents as it has rows, and each of a few equally often."""
    task = Instruct(corpus=corpus)
    for rows in (20, 40, 80):
        found = documents(task.sample(rows, length=16, generator=torch.Generator()))
        assert len(set(found)) == min(rows, len(PAIRS))


def test_every_answer_token_has_the_same_weight(corpus: str) -> None:
    """Over an epoch, the mean of the rows' weights is one, and no weight differs from another."""
    task = Instruct(corpus=corpus)
    layout = task._rows(2, 16, 0)
    batches = [
        task.whole_documents([stream], step, **HOW)
        for stream in range(2)
        for step in range(layout.epochs[stream])
    ]
    weights = torch.cat([batch.weights for batch in batches if batch.weights is not None])
    scored = torch.cat([batch.answers() for batch in batches])
    assert len(weights[scored].unique()) == 1
    assert not weights[~scored].any()
    assert float(weights.sum(1).mean()) == pytest.approx(1)


def test_a_carried_state_continues_long_documents(tmp_path: Path) -> None:
    """With a carried state a document continues in the next segment, and nothing is padded."""
    corpus = instruct_corpus(tmp_path / "c", [("x" * 40, "yes"), ("z", "no")])
    task = Instruct(corpus=corpus)
    how = {"n_streams": 1, "length": 16, "seed": 0}
    batches = [task.segment([0], step, **how) for step in range(11)]  # four epochs of 44 tokens
    assert all(batch.is_token is None for batch in batches)
    starts = torch.cat([batch.is_document_start[0] for batch in batches])
    tokens = torch.cat([batch.tokens[0] for batch in batches])
    targets = torch.cat([batch.targets[0] for batch in batches])
    assert int(starts.sum()) == 8
    assert {chr(int(x)) for x in tokens[starts]} == {"x", "z"}
    answered = bytes(targets[targets != UNSCORED].tolist()).decode()
    assert answered.count("yes") == answered.count("no") == 4
    assert task.longest_document(16) == 3


def test_long_documents_are_refused_or_truncated(tmp_path: Path) -> None:
    """A document that does not fit is refused with what to do; truncated ones are reported."""
    pairs = [("x" * 40, "yes"), ("q", "no" * 20), ("q", "no")]
    corpus = instruct_corpus(tmp_path / "c", pairs)
    with pytest.raises(UserError, match=naming("truncate", 16)):
        Instruct(corpus=corpus).whole_documents([0], 0, **{**HOW, "n_streams": 1})
    task = Instruct(corpus=corpus, truncate=True)
    how = {"n_streams": 1, "length": 16, "seed": 0}
    assert "2 documents" in task.whole_layout(**how)
    kept = {prompt: answer for step in range(2) for prompt, answer in
            documents(task.whole_documents([0], step, **how))}  # fmt: skip
    assert kept["q"] in ("no" * 8, "no")
    assert not any(prompt.startswith("x") for prompt in kept)
    with pytest.raises(UserError):
        only = instruct_corpus(tmp_path / "d", pairs[:1])
        Instruct(corpus=only, truncate=True).whole_documents([0], 0, **{**how, "length": 2})


def test_a_corpus_without_answers_is_refused(tmp_path: Path, corpus: str) -> None:
    """A corpus of plain text is refused; text can be trained on a corpus of answers."""
    with pytest.raises(UserError, match="--instruct"):
        Instruct(corpus=text_corpus(tmp_path / "text", ["some text"]))
    assert Text(corpus=corpus, packing=True).sample(
        2, length=30, generator=torch.Generator()
    ).tokens.shape == (2, 30)
    with pytest.raises(UserError):
        Instruct()
