"""Passkey documents that continue over segments, on which truncated backpropagation trains."""

import re
from typing import Any

import pytest
import torch

from longrnn.data import UNSCORED, Batch, Passkey
from longrnn.data.prompts import ANSWER, FILLER, KEY_LINE, PROMPT_HEADER, QUESTION
from longrnn.text import ByteTokenizer

LENGTH, STEPS, N_STREAMS = 160, 60, 6


def build(**options: Any) -> Passkey:
    settings: dict[str, Any] = {"max_segments": 8, **options}
    return Passkey(**settings)


def body(batch: Batch, row: int) -> str:
    """The part of a row that enters the carried state."""
    tokens = batch.tokens[row, : batch.tokens.shape[1] - batch.query_length]
    return ByteTokenizer().decode(tokens.tolist())


@pytest.fixture(scope="module")
def segments() -> list[Batch]:
    """All streams at every step, in order."""
    task = build()
    return [
        task.batch(step, range(N_STREAMS), of=N_STREAMS, length=LENGTH, seed=7, carried=True)
        for step in range(STEPS)
    ]


def documents(segments: list[Batch], stream: int) -> list[list[Batch]]:
    """The complete documents of a stream, each a list of one-row batches."""
    found: list[list[Batch]] = []
    for batch in segments:
        if batch.begins[stream]:
            found.append([])
        found[-1].append(batch.row(stream))
    return found[:-1]


def fillers(document: list[Batch]) -> list[str]:
    """The filler of each segment, after asserting that all else is one header and one key line."""
    text = "".join(body(part, 0) for part in document)
    assert len(text) == LENGTH * len(document)
    match = re.search(r"The passkey is (\d{5})", text)
    assert match is not None
    assert text.startswith(PROMPT_HEADER)
    line = KEY_LINE.format(key=match[1])
    assert text.count(match[1]) == 2
    parts = [body(part, 0).removeprefix(PROMPT_HEADER) for part in document]
    assert sum(part.count(line) for part in parts) == 1
    return [part.replace(line, "") for part in parts]


def test_documents_are_header_filler_key_line_filler(segments: list[Batch]) -> None:
    lengths, starts = set(), set()
    for stream in range(N_STREAMS):
        for document in documents(segments, stream):
            text = "".join(fillers(document))
            endless = FILLER * (len(text) // len(FILLER) + 2)
            assert text in endless
            starts.add(endless.index(text))
            lengths.add(len(document))
    assert min(len(lengths), len(starts)) > 3
    assert max(lengths) <= 8


def test_the_question_is_asked_on_a_fork(segments: list[Batch]) -> None:
    """Its tokens do not enter the carried state, and the last token of a segment has no target."""
    assert segments[0].begins.all()
    for batch in segments:
        assert batch.tokens.shape == (N_STREAMS, LENGTH + batch.query_length)
        assert (batch.targets[:, LENGTH - 1] == UNSCORED).all()
        assert torch.equal(batch.targets[:, : LENGTH - 1], batch.tokens[:, 1:LENGTH])
        assert not batch.answers()[:, :LENGTH].any()
        for row in range(N_STREAMS):
            query = ByteTokenizer().decode(batch.tokens[row, LENGTH:].tolist())
            assert bool(batch.begins[row]) == body(batch, row).startswith(PROMPT_HEADER)
            assert QUESTION not in body(batch, row)
            assert re.fullmatch(re.escape(QUESTION) + r" \d{4}", query)


def test_rows_are_asked_at_doubling_distances(segments: list[Batch]) -> None:
    """The question follows 0, 1, 2, 4, … segments after the key, and never before it."""
    distances = set()
    for stream in range(N_STREAMS):
        for document in documents(segments, stream):
            since = None  # segments since the key line
            for part in document:
                match = re.search(r"The passkey is (\d{5})", body(part, 0))
                since = 0 if match else since if since is None else since + 1
                answer = part.answers()[0]
                assert bool(answer.any()) == (since in (0, 1, 2, 4, 8, 16, 32, 64))
                said = ByteTokenizer().decode(part.targets[0][answer].tolist())
                assert not match or said == ANSWER.format(key=match[1])
                digits = part.targets[0, LENGTH + len(QUESTION) :]
                assert answer.any() or (digits == UNSCORED).all()
                asked = slice(LENGTH, LENGTH + len(QUESTION) - 1)
                assert ByteTokenizer().decode(part.targets[0, asked].tolist()) == QUESTION[1:]
                distances |= {since} if answer.any() else set()
    assert distances >= {0, 1, 2, 4}


def test_documents_grow_with_the_steps() -> None:
    task = build(max_segments=16, grow_steps=300)
    how: dict[str, Any] = {"of": N_STREAMS, "length": LENGTH, "seed": 0, "carried": True}
    early, late = (
        torch.stack([task.batch(step, range(20), **how).begins for step in steps]).float().mean()
        for steps in (range(4), range(400, 440))
    )
    assert early > 0.9
    assert late < 0.5


def test_segments_of_filler_count_many_times() -> None:
    task = build(min_segments=3, max_segments=3, max_repeat=1000, grow_steps=60)
    counts: dict[int, list[int]] = {}
    for step in range(120):
        batch = task.batch(step, range(20), of=20, length=LENGTH, seed=1, carried=True)
        assert bool(batch.begins.any()) == (step % 3 == 0)
        if batch.repeat is None:
            continue
        for row, times in enumerate(batch.repeat.tolist()):
            counts.setdefault(step, []).append(times)
            assert 1 <= times <= 1000
            assert times == 1 or fillers_only(body(batch, row))
    assert max(max(counts.get(step, [1])) for step in range(6)) < 30
    assert max(max(counts.get(step, [1])) for step in range(60, 120)) > 300
    assert build().batch(5, range(20), of=20, length=LENGTH, seed=1, carried=True).repeat is None


def fillers_only(text: str) -> bool:
    return text in FILLER * (len(text) // len(FILLER) + 2)
