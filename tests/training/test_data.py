"""Batches as a function of seed, step, micro-batch and process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.errors import UserError
from longrnn.tasks import TASKS, Batch, Text
from longrnn.tasks.base import joined
from longrnn.training.config import TrainConfig
from longrnn.training.data import Source
from tests.tasks.corpora import instruct_corpus, text_corpus
from tests.tasks.test_contract import assert_batches_equal
from tests.texts import TEXTS
from tests.training.runs import KINDS, tiny

NOWHERE = Path("unused")


def source(config: TrainConfig, rank: int = 0, world_size: int = 1) -> Source:
    return Source(TASKS.build(config.task, None), config, rank, world_size)


def batch(source: Source, step: int, micro: int) -> Batch:
    """The first segment of a micro-batch."""
    return source.segments(step, micro)[0]


@pytest.fixture
def kinds(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Changes of a tiny run by name: those of KINDS, and tasks on packed rows."""
    words = ["lorem ipsum dolor"[: 2 + k % 15] * (1 + k % 7) for k in range(90)]
    texts = text_corpus(tmp_path / "texts", words)
    answers = instruct_corpus(tmp_path / "answers", [(word, word[::-1]) for word in words])
    carry = {"initial_state": {"kind": "carry"}}
    packed = {"task": {"kind": "text", "corpus": texts, "packing": True}}
    instruct = {"task": {"kind": "instruct", "corpus": answers, "packing": False}}
    return {
        **{kind: {} for kind in KINDS},
        "packed": packed,
        "packed_streams": {**packed, **carry},
        "instruct": {**instruct, "length": {"max": 250}},
        "instruct_streams": {**instruct, **carry},
    }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "kind", [*sorted(KINDS), "packed", "packed_streams", "instruct", "instruct_streams"]
)
def test_the_global_batch_does_not_depend_on_the_number_of_processes(
    kind: str, world_size: int, kinds: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes together see the rows of one process, also of blocks that they share."""
    monkeypatch.setattr("longrnn.tasks.base.BLOCK", 3)
    # batch_tokens is a bound for each process, and would change the number of rows.
    how = {**kinds[kind], "batch_tokens": None}
    base = kind if kind in KINDS else "fitted_noise"
    if kind not in KINDS:
        how = {"length": {"max": 64}, "initial_state": {"kind": "zero"}, **how}
    whole = source(tiny(base, NOWHERE, per_device_train_batch_size=8, **how))
    part = tiny(base, NOWHERE, per_device_train_batch_size=8 // world_size, **how)
    processes = [source(part, rank, world_size) for rank in range(world_size)]
    for step, micro in [(0, 0), (5, 0), (2, 0), *([(5, 1)] if whole.n_streams > 8 else [])]:
        parts = [one.segments(step, micro) for one in processes]
        for pieces, wanted in zip(
            zip(*parts, strict=True), whole.segments(step, micro), strict=True
        ):
            # Padding is marked only where there is some.
            pieces = [with_padding(piece) for piece in pieces]
            assert_batches_equal(joined(pieces), with_padding(wanted))


def with_padding(batch: Batch) -> Batch:
    mask = torch.ones_like(batch.is_document_start)
    return batch if batch.is_token is not None else batch._replace(is_token=mask)


def test_a_process_reads_only_its_own_rows(tmp_path: Path) -> None:
    """A process among many reads as many documents as one with the same rows alone."""
    config = tiny("fitted_noise", NOWHERE, length={"max": 64}, per_device_train_batch_size=2)
    one = source(config, 300, 512)
    assert isinstance(one.task, Text)
    read: list[int] = []
    documents = one.task.documents

    class Watched:
        lengths, sha256 = documents.lengths, documents.sha256

        def read(self, document: int, start: int, stop: int) -> torch.Tensor:
            read.append(document)
            return documents.read(document, start, stop)

    one.task.documents = Watched()
    one.segments(0, 0)
    assert len(read) == 2


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_batches_do_not_depend_on_earlier_ones(kind: str) -> None:
    """A batch is a pure function of step and micro-batch."""
    config = tiny(kind, NOWHERE)
    straight = source(config)
    batches = {(step, micro): batch(straight, step, micro) for step in range(6) for micro in (0, 1)}
    assert_batches_equal(batch(source(config), 5, 1), batches[5, 1])
    assert_batches_equal(batch(straight, 3, 0), batches[3, 0])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_steps_micro_batches_and_seeds_differ(kind: str) -> None:
    """Steps, micro-batches and seeds have different rows."""
    config = tiny(kind, NOWHERE)
    one, other = source(config), source(tiny(kind, NOWHERE, seed=1))
    batches = [batch(one, 0, 0), batch(one, 0, 1), batch(one, 1, 0), batch(other, 0, 0)]
    texts = {drawn.tokens.numpy().tobytes() for drawn in batches}
    assert len(texts) == len(batches)


def test_lengths_are_log_uniform_and_grow() -> None:
    """Lengths stay within their bounds and grow over grow_steps."""
    length = {"max": 64, "min": 4, "sampling": "log_uniform", "grow_steps": 100}
    grown = source(tiny("reverse", NOWHERE, length=length))
    lengths = [batch(grown, step, 0).tokens.shape[1] // 2 for step in range(600)]
    assert min(lengths) >= 4
    assert max(lengths[:10]) <= 6  # at most 4 · 16^0.1
    late = sorted(lengths[100:])
    assert late[-1] <= 64
    assert late[-1] > 50
    # Half of a log-uniform sample lies below the geometric mean, 16.
    assert 12 <= late[len(late) // 2] <= 21


def test_fixed_lengths_are_the_longest() -> None:
    """With fixed sampling, every row has length.max tokens."""
    fixed = source(tiny("reverse", NOWHERE, length={"max": 9, "min": 3}))
    assert {batch(fixed, step, 0).tokens.shape[1] for step in range(20)} == {18}


def test_a_fixed_length_grows() -> None:
    """With grow_steps, a fixed length grows log-linearly from min to max."""
    length = {"max": 64, "min": 4, "grow_steps": 100}
    grown = source(tiny("reverse", NOWHERE, length=length))
    lengths = [batch(grown, step, 0).tokens.shape[1] // 2 for step in range(150)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[49], lengths[99], lengths[149]) == (4, 16, 64, 64)
    assert grown.longest() == 128


def test_segments_of_a_step_follow_each_other() -> None:
    """The segments of consecutive steps are consecutive segments of the stream."""
    config = tiny("streams", NOWHERE)
    two, one = source(config), source(tiny("streams", NOWHERE, segments_per_step=1))
    for step in range(4):
        for micro in (0, 1):
            pair = two.segments(step, micro)
            assert len(pair) == 2
            for index, found in enumerate(pair):
                assert_batches_equal(found, one.segments(2 * step + index, micro)[0])
    micros = [two.segments(0, micro)[0].tokens for micro in (0, 1)]
    assert not torch.equal(micros[0], micros[1])


def test_longest_knows_streams() -> None:
    """`longest` covers the longest document that the run may read."""
    assert source(tiny("streams", NOWHERE)).longest() == 5 * 64
    assert source(tiny("streams", NOWHERE, max_steps=2)).longest() == 4 * 64
    uncut = {**KINDS["streams"]["task"], "max_segments": None}
    longest = max(Path(file).stat().st_size for file in TEXTS)
    found = source(tiny("streams", NOWHERE, task=uncut, max_steps=10**6)).longest()
    assert found == (longest - 1) // 64 * 64


def test_layout_says_what_is_left_out() -> None:
    """`layout` reports the text that no segment reads."""
    said = source(tiny("streams", NOWHERE)).layout()
    assert "documents" in said
    assert "64" in said
    assert "documents" in said
    assert source(tiny("reverse", NOWHERE)).layout() == ""


def test_fewer_documents_than_streams() -> None:
    config = tiny("streams", NOWHERE, per_device_train_batch_size=10**5)
    with pytest.raises(UserError, match="200,000"):
        source(config).check()


def test_batch_tokens_bounds_rows_times_length() -> None:
    """Rows times length stays within batch_tokens."""
    length = {"max": 32, "min": 4, "sampling": "log_uniform"}
    bounded = source(tiny("reverse", NOWHERE, length=length, batch_tokens=48))
    shapes = {tuple(batch(bounded, step, 0).tokens.shape) for step in range(60)}
    for rows, width in shapes:
        assert rows == max(1, min(8, 48 // (width // 2)))
    assert len({rows for rows, _ in shapes}) > 2
