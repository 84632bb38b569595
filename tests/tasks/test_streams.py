"""Streams: each reads its tokens in order, once per epoch, as a pure function."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrnn.errors import UserError
from longrnn.tasks.packed_streams import PackedStreams, WholeDocuments
from longrnn.tasks.streams import Place, Streams

MANY = [5, 100, 33, 64, 1, 65, 7, 40, 41, 90, 2, 17]


def streams(lengths: list[int], n_streams: int, **how: int | None) -> Streams:
    settings = {"length": 4, "max_segments": None, "seed": 0, **how}
    return Streams(lengths, n_streams=n_streams, **settings)  # type: ignore[arg-type]


def epoch(layout: Streams, stream: int, number: int) -> list[Place]:
    """What a stream reads in one of its epochs."""
    size = layout.epochs[stream]
    return [layout.place(stream, step) for step in range(number * size, (number + 1) * size)]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    n_streams=st.integers(1, 6),
    length=st.integers(1, 9),
    max_segments=st.none() | st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_every_token_once_an_epoch_in_order(
    lengths: list[int], n_streams: int, length: int, max_segments: int | None, seed: int
) -> None:
    """In an epoch every segment is read once, in order, by one stream, within its document."""
    how = {"length": length, "max_segments": max_segments, "seed": seed}
    possible = [(n - 1) // length for n in lengths]
    parts = [-(-n // max_segments) if max_segments else min(1, n) for n in possible]
    if sum(parts) < n_streams:
        with pytest.raises(UserError, match="streams"):
            streams(lengths, n_streams, **how)
        return
    layout = streams(lengths, n_streams, **how)
    for number in (0, 1, 5):
        read: dict[int, list[int]] = {index: [] for index in range(len(lengths))}
        homes: dict[int, set[int]] = {}
        for stream in range(n_streams):
            places = epoch(layout, stream, number)
            assert places[0].is_document_start
            for before, place in zip([None, *places], places, strict=False):
                if not place.is_document_start:
                    # It goes on exactly where the stream stopped.
                    assert before is not None
                    goes_on = (before.document, before.start + length)
                    assert (place.document, place.start) == goes_on
                assert place.start + length + 1 <= lengths[place.document]
                read[place.document].append(place.start)
                homes.setdefault(place.document, set()).add(stream)
            if max_segments is not None:
                is_document_start = [
                    index for index, place in enumerate(places) if place.is_document_start
                ]
                runs = [
                    b - a
                    for a, b in zip(
                        is_document_start, [*is_document_start[1:], len(places)], strict=True
                    )
                ]
                assert max(runs) <= max_segments
        dropped = 0
        for document, starts in read.items():
            wanted = (lengths[document] - 1) // length
            assert sorted(starts) == [k * length for k in range(wanted)]
            dropped += lengths[document] - 1 - wanted * length
        assert layout.dropped_tokens == dropped
        if max_segments is None:
            assert all(len(found) == 1 for found in homes.values())
    assert layout.dropped_documents == sum(n <= length for n in lengths)


def test_a_place_is_a_function_of_stream_and_step() -> None:
    """A place depends only on stream and step, in whatever order places are read."""
    layout = streams(MANY, 3)
    asked = {
        (stream, step): layout.place(stream, step) for step in range(300) for stream in range(3)
    }
    for stream, step in [(2, 299), (0, 7), (1, 150), (2, 3)]:
        assert streams(MANY, 3).place(stream, step) == asked[stream, step]
        assert layout.place(stream, step) == asked[stream, step]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """Every epoch and seed has its own order."""
    layout = streams(MANY, 2)
    orders = {tuple(epoch(layout, 0, number)) for number in range(6)}
    assert len(orders) > 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(epoch(layout, 0, 0)))}
    starts = {tuple(epoch(streams(MANY, 2, seed=seed), 0, 0)) for seed in range(6)}
    assert len(starts) > 3


def test_streams_are_balanced() -> None:
    """The epochs of the streams have similar sizes.

    Longest first to the shortest stream leaves streams apart by less than the longest document.
    """
    rising = [4 * n + 1 for n in range(1, 200)]
    layout = streams(rising, 8)
    assert max(layout.epochs) - min(layout.epochs) < 8
    assert sum(layout.epochs) == sum(range(1, 200))
    uneven = streams([4001, 41, 41, 41], 2)
    assert sorted(uneven.epochs) == [30, 1000]
    cut = streams([4001, 41, 41, 41], 2, max_segments=50)
    assert max(cut.epochs) - min(cut.epochs) <= 50


def test_long_documents_are_cut_evenly() -> None:
    """The parts of a long document differ by at most one segment."""
    layout = streams([4 * 101 + 1], 1, max_segments=50)
    is_document_start = sorted(
        place.start // 4 for place in epoch(layout, 0, 0) if place.is_document_start
    )
    assert is_document_start == [0, 33, 67]


@pytest.mark.parametrize(
    ("lengths", "n_streams", "says"),
    [
        ([100, 100], 3, "task.max_segments=16"),
        ([5, 5, 4], 3, "length.max"),
        ([3, 2], 1, "length.max"),
    ],
)
def test_fewer_documents_than_streams(lengths: list[int], n_streams: int, says: str) -> None:
    """More streams than documents are refused, and the remedy works."""
    with pytest.raises(UserError, match=says):
        streams(lengths, n_streams)
    if "max_segments" in says:
        assert streams(lengths, n_streams, max_segments=16).documents >= n_streams


def test_documents_are_spread_by_size_and_not_by_number() -> None:
    """Documents are spread so that the streams have similar sizes."""
    layout = streams([401] + [41] * 10, 2)
    found = Counter(place.document for place in epoch(layout, 0, 0) + epoch(layout, 1, 0))
    assert found[0] == 100
    assert sorted(layout.epochs) == [100, 100]


@pytest.mark.parametrize(
    ("max_segments", "digest"), [(None, "1e0299e89bff4a8b"), (3, "fc2f0df60054c521")]
)
def test_layouts_of_earlier_versions_are_kept(max_segments: int | None, digest: str) -> None:
    """Up to LISTED documents, a seed gives the places that it always gave: runs can be resumed."""
    rng = random.Random(5)
    lengths = [rng.randrange(2, 3000) for _ in range(100)]
    layout = streams(lengths, 7, length=16, max_segments=max_segments, seed=11)
    places = [tuple(layout.place(k, step)) for k in range(7) for step in range(0, 900, 7)]
    assert hashlib.sha256(repr(places).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("n_streams", [1, 5, 40])
def test_many_documents_are_laid_out_like_few(
    n_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond LISTED documents, streams still read each segment once and have similar sizes."""
    monkeypatch.setattr("longrnn.tasks.streams.LISTED", 50)
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(3, 1)) + 2 for _ in range(1000)]
    layout = streams(lengths, n_streams)
    read = Counter(
        (place.document, place.start)
        for stream in range(n_streams)
        for place in epoch(layout, stream, 1)
    )
    assert set(read.values()) == {1}
    assert len(read) == sum((n - 1) // 4 for n in lengths) == sum(layout.epochs)
    assert max(layout.epochs) - min(layout.epochs) <= max(lengths) // 4
    assert streams(lengths, n_streams).epochs == layout.epochs


def packed_streams(lengths: list[int], n_streams: int, **how: int | None) -> PackedStreams:
    settings = {"length": 4, "max_segments": None, "seed": 0, **how}
    return PackedStreams(lengths, n_streams=n_streams, **settings)  # type: ignore[arg-type]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    n_streams=st.integers(1, 4),
    length=st.integers(1, 9),
    max_segments=st.none() | st.integers(1, 3),
)
def test_packed_streams_drop_nothing(
    lengths: list[int], n_streams: int, length: int, max_segments: int | None
) -> None:
    """Every token that has a predecessor is predicted once per epoch, in the order of the text."""
    how = {"length": length, "max_segments": max_segments}
    most = (max_segments or 1000) * length
    if sum(-(-(n - 1) // most) for n in lengths) < n_streams:
        with pytest.raises(UserError, match="streams"):
            packed_streams(lengths, n_streams, **how)
        return
    layout = packed_streams(lengths, n_streams, **how)
    read: Counter[tuple[int, int]] = Counter()
    for stream in range(n_streams):
        steps = layout.epochs[stream]  # `length` epochs
        last = None
        for step in range(steps):
            pieces = layout.pieces(stream, step)
            assert sum(piece.size for piece in pieces) == length
            for piece in pieces:
                assert piece.start + piece.size + 1 <= lengths[piece.document]
                if not piece.is_document_start:
                    assert last == (piece.document, piece.start)
                last = piece.document, piece.start + piece.size
                for place in range(piece.start, piece.start + piece.size):
                    read[piece.document, place] += 1
    wanted = {(k, place): length for k, n in enumerate(lengths) for place in range(n - 1)}
    assert read == wanted


@pytest.mark.parametrize("most", [0, 12])
def test_whole_documents_are_read_once_per_epoch(most: int) -> None:
    """Rows hold whole documents, at most `most` tokens of them, and each document once."""
    rng = random.Random(1)
    sizes = np.array([rng.randrange(0, 13) for _ in range(200)])
    layout = WholeDocuments(sizes, n_streams=3, most=most, seed=0)
    for number in (0, 4):
        read: list[int] = []
        for stream in range(3):
            size = layout.epochs[stream]
            for step in range(number * size, (number + 1) * size):
                pieces = layout.pieces(stream, step)
                assert all(p.is_document_start and p.size == sizes[p.document] for p in pieces)
                assert sum(p.size for p in pieces) <= (most or 12)
                assert most or len(pieces) == 1
                read += [piece.document for piece in pieces]
        assert sorted(read) == np.flatnonzero(sizes).tolist()
    if most:
        # Next-fit leaves less than the next document free.
        assert layout.documents < 2 * sizes.sum() / most + 1
    with pytest.raises(UserError, match="rows"):
        WholeDocuments(sizes, n_streams=10**4, most=most, seed=0)
