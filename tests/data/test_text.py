"""Rows of texts and of answers: every token once, exact borders, nothing scored across them."""

import json
import shutil
import threading
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from longrnn.data import TASKS, UNSCORED, Batch, Text
from longrnn.data.build import build, corpus_of
from longrnn.errors import UserError
from longrnn.text import ByteTokenizer, Reading
from tests.data.drawings import drawing
from tests.holders import held
from tests.refusals import naming

# Every character occurs once, so that a token says where it is in its document.
LENGTHS = (30, 7, 2, 41, 18, 25)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def texts(folder: Path) -> list[bytes]:
    """Documents without a common byte."""
    place, made = 1, []
    (folder / "texts").mkdir()
    for number, length in enumerate(LENGTHS):
        made.append(bytes(range(place, place + length)))
        (folder / f"texts/{number}.txt").write_bytes(made[-1])
        place += length
    return made


def text_task(**options: Any) -> Text:
    task = TASKS.build({"kind": "text", "data": "texts", **options}, None)
    assert isinstance(task, Text)
    return task


def pairs_of(texts: list[bytes]) -> Counter[tuple[int, int]]:
    """Every token with the one after it in its document."""
    return Counter(pair for text in texts for pair in pairwise(text))


def read_pairs(batches: list[Batch]) -> Counter[tuple[int, int]]:
    """The tokens and their targets in batches."""
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        scored = batch.targets != UNSCORED
        found.update(
            zip(batch.tokens[scored].tolist(), batch.targets[scored].tolist(), strict=True)
        )
    return found


def test_the_drawing_in_the_docstring(folder: Path) -> None:
    (folder / "a.txt").write_text("to be")
    batch = TASKS.build({"kind": "text", "data": "a.txt"}, None).sample(1, length=4)
    rows = {"tokens": batch.tokens, "targets": batch.targets}
    assert drawing(TASKS["text"]) == {n: list(map(chr, x[0].tolist())) for n, x in rows.items()}


@pytest.mark.parametrize("length", [1, 5, 16, 117])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_token_is_read_once_per_epoch(texts: list[bytes], length: int, seed: int) -> None:
    """Every pair of tokens of a document is covered once, with the same share of the losses."""
    task, expected, orders = text_task(), pairs_of(texts), []
    rows = -(-sum(expected.values()) // length)
    for epoch in range(2):
        batches = [
            task.batch(index, range(1), of=1, length=length, seed=seed, carried=False)
            for index in range(epoch * rows, (epoch + 1) * rows)
        ]
        assert read_pairs(batches) == expected
        assert all(batch.begins.all() for batch in batches)
        weights = [
            batch.answers() / length if batch.weights is None else batch.weights
            for batch in batches
        ]
        shares = torch.cat([w[w > 0] for w in weights])
        assert shares.tolist() == pytest.approx([rows / expected.total()] * expected.total())
        orders.append([batch.tokens.tolist() for batch in batches])
    assert rows == 1 or orders[0] != orders[1]


@pytest.mark.parametrize(("of", "length"), [(1, 8), (3, 8), (4, 5), (2, 41)])
def test_carried_rows_read_every_token_once_per_epoch(
    texts: list[bytes], of: int, length: int
) -> None:
    task, expected = text_task(), pairs_of(texts)
    places = sum(expected.values())
    how: dict[str, Any] = {"of": of, "length": length, "seed": 2, "carried": True}
    batches = [task.batch(index, range(of), **how) for index in range(3 * places // length)]
    whole: Counter[tuple[int, int]] = Counter()
    for row in range(of):
        tokens, targets, starts = (
            torch.cat([getattr(batch, name)[row] for batch in batches])
            for name in ("tokens", "targets", "is_document_start")
        )
        for target, token, begins in zip(targets[:-1], tokens[1:], starts[1:], strict=True):
            assert bool(begins) == (int(target) != int(token))
        assert bool(starts[0])
        share = (row + 1) * places // of - row * places // of
        epoch = list(zip(tokens.tolist(), targets.tolist(), strict=True))[:share]
        whole.update(epoch)
    assert whole == expected


@pytest.mark.parametrize(("of", "length"), [(2, 8), (3, 41)])
def test_rows_of_whole_documents(texts: list[bytes], of: int, length: int) -> None:
    """Each token has the same share of the losses, and every process as many segments."""
    task, weights = text_task(), []
    tokens: list[bytes] = []
    for index in range(len(LENGTHS) // of):
        how: dict[str, Any] = {"of": of, "length": length, "seed": 1}
        segments = task.documents(index, range(of), **how)
        for row in range(of):
            alone = task.documents(index, range(row, row + 1), **how)
            for one, other in zip(alone, segments, strict=True):
                assert torch.equal(one.tokens[0], other.tokens[row])
            read = torch.cat([one.tokens[0][one.answers()[0]] for one in alone])
            tokens.append(bytes(read.tolist()))
        assert [one.begins.tolist() for one in segments[1:]] == [[False] * of] * (len(segments) - 1)
        for one in segments:
            assert one.weights is not None
            weights.append(one.weights[one.answers()] / len(segments))
    assert sorted(tokens) == sorted(text[:-1] for text in texts)
    places = sum(LENGTHS) - len(LENGTHS)
    assert torch.cat(weights).tolist() == pytest.approx([len(LENGTHS) / places] * places)


def test_held_out_documents_are_not_trained_on(texts: list[bytes]) -> None:
    data = [f"texts/{number}.txt" for number in range(4)]
    parts = [read_all(text_task(data=data, part=part)) for part in ("training", "held_out")]
    assert all(parts)
    assert not parts[0] & parts[1]
    assert not parts[1] & {*pairwise(texts[3])}  # held out is not simply the end
    assert parts[0] | parts[1] <= set(pairs_of(texts[:4]))
    assert sum(map(len, parts)) >= sum(pairs_of(texts[:4]).values()) - 1  # one pair was cut


def read_all(task: Text) -> set[tuple[int, int]]:
    count = task.corpus.places
    how: dict[str, Any] = {"of": 1, "length": 1, "seed": 0, "carried": False}
    return set(read_pairs([task.batch(index, range(1), **how) for index in range(count)]))


ANSWERS = [("ab", "c"), ("d", "efg"), ("hijk", "lm"), ("n", "o" * 30)]


@pytest.fixture
def answers(folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "completion": c}) for p, c in ANSWERS))
    return path


def instruct_task(answers: Path) -> Any:
    return TASKS.build({"kind": "instruct", "data": str(answers)}, None)


def test_only_answers_are_scored(answers: Path) -> None:
    task = instruct_task(answers)
    wanted = Counter(c for _, completion in ANSWERS[:3] for c in completion)
    for length, seed in product((5, 7, 9, 12), range(3)):
        seen: Counter[str] = Counter()
        for index in range(len(task.rows(length, seed)[0])):
            batch = task.batch(index, range(1), of=1, length=length, seed=seed, carried=False)
            assert batch.tokens.shape == (1, length)
            scored = batch.targets[batch.targets != UNSCORED].tolist()
            seen.update(c for c in map(chr, scored) if c != "o")
            is_token = torch.ones(1, length).bool() if batch.is_token is None else batch.is_token
            assert (batch.targets[~is_token] == UNSCORED).all()
            begun = {chr(i) for i in batch.tokens[batch.is_document_start].tolist()}
            assert begun <= {"a", "d", "h", "n"}
        assert seen == wanted


def test_held_out_answers_are_whole_documents(answers: Path) -> None:
    parts = ("training", "held_out")
    built = [
        TASKS.build({"kind": "instruct", "data": str(answers), "part": p}, None) for p in parts
    ]
    found = [length for task in built for length in cast(Text, task).corpus.lengths.tolist()]
    assert sorted(found) == sorted(len(prompt + completion) for prompt, completion in ANSWERS)


def test_answers_weigh_the_same_in_every_row(answers: Path) -> None:
    """The mean row has weight 1. The first token of a document is not predicted."""
    with open(answers, "a") as file:
        file.write("\n" + json.dumps({"prompt": "", "completion": "pq"}))
    task = instruct_task(answers)
    rows = len(task.rows(31, 0)[0])
    batch = task.batch(0, range(rows), of=rows, length=31, seed=0, carried=False)
    assert rows > 1
    assert len(batch.weights[batch.weights > 0].unique()) == 1
    assert float(batch.weights.sum(1).mean()) == pytest.approx(1)


def test_a_corpus_is_found_again(texts: list[bytes], folder: Path) -> None:
    one = corpus_of("texts", ByteTokenizer())
    made = one.folder.stat().st_mtime_ns
    assert corpus_of("texts", ByteTokenizer()).folder.stat().st_mtime_ns == made
    assert one.tokens.tolist() == list(b"".join(texts))
    ended = ByteTokenizer()
    ended.eos_id = 0
    assert corpus_of("texts", ended).folder != one.folder
    Path("texts/0.txt").write_bytes(texts[0][::-1])  # of the same size
    assert corpus_of("texts", ByteTokenizer()).folder != one.folder


def test_a_run_waits_for_a_corpus_that_another_process_builds(folder: Path) -> None:
    (folder / "a.txt").write_text("a b c")
    place = corpus_of("a.txt", ByteTokenizer()).folder
    shutil.rmtree(place)
    waiting = threading.Thread(target=corpus_of, args=("a.txt", ByteTokenizer()))
    with held(place):
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join()
    assert place.is_dir()
    reading = Reading(split_on=" ", min_length=1)
    build(["a.txt"], ByteTokenizer(), folder / "one", reading=reading, quiet=True)
    with pytest.raises(UserError, match=naming("one", "--min-length")):
        text_task(data="one")
