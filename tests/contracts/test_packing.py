"""A padded or packed batch gives what its documents give one by one.

Outputs, final state and gradients, for every cell, backend, position encoding and mitigation. Rows
are drawn at random: documents of any length, the first of which may continue the given state, with
padding before, between and inside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrnn import state as states
from longrnn.mitigations import Mitigated
from longrnn.mixers import LSTM, MIXERS, ScanningMixer
from longrnn.models import RecurrentLM, segments
from longrnn.ops.ssd import BACKENDS
from longrnn.state import LMState, leaves
from tests.contracts.builders import (
    BLOCK_KINDS,
    DEFINED,
    DTYPES,
    LONGEST,
    MIXER_SPECS,
    POSITION_SPECS,
    VOCAB,
    assert_near,
    assert_same,
    assert_trees_equal,
    build_mitigated,
    build_model,
    differentiable,
    generator,
    gradients,
    is_interpreted,
    parameters,
    random_start,
    random_state,
    random_tokens,
    real_leaves,
    small_chunks,
    spec_id,
    splits,
    with_positions,
)

pytestmark = pytest.mark.core

POSITION_KINDS = [spec["kind"] for spec in POSITION_SPECS]
Model = RecurrentLM | Mitigated
# The name of the embedding in a plain and in a mitigated model.
EMBEDDING = ("embedding.weight", "model.embedding.weight")
seeds = st.integers(0, 10**6)


class Rows(NamedTuple):
    """Arguments of a model: `(b, t)` each."""

    tokens: Tensor
    is_token: Tensor
    is_document_start: Tensor

    @property
    def masks(self) -> dict[str, Tensor]:
        return {"is_token": self.is_token, "is_document_start": self.is_document_start}


def draw_rows(batch: int, time: int, seed: int) -> Rows:
    """Random rows; ids at padding are not in the vocabulary, and some rows are padding only."""
    randomness = generator(seed)

    def chance(limit: float) -> Tensor:
        return torch.rand(batch, time, generator=randomness) < limit

    left, right = (torch.randint(0, time // 3 + 1, (batch, 1), generator=randomness) for _ in "ab")
    index = torch.arange(time)
    is_token = (index >= left) & (index < time - right) & ~chance(0.2)
    is_token &= torch.rand(batch, 1, generator=randomness) < 0.9
    starts = chance(0.15) & is_token
    tokens = random_tokens(batch, time, seed).masked_fill(~is_token, VOCAB + 3)
    return Rows(tokens, is_token, starts)


def started(model: Model, batch: int, seed: int) -> LMState:
    """A state after some tokens of a random one, so that memories and carries are not initial."""
    if isinstance(model, Mitigated):
        start = random_start(model, batch, seed)
    else:
        start = random_state(model, batch, seed)
    return states.detach(model(random_tokens(batch, 5, seed), start, keep=0).state)


def packed(model: Model, rows: Rows, state: LMState, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Outputs, final state and gradients of calls with masks."""
    state = differentiable(state)
    outputs, after = [], state
    for part in zip(*(tensor.split(list(sizes), 1) for tensor in rows), strict=True):
        piece = Rows(*part)
        logits, after = model(piece.tokens, after, **piece.masks)
        outputs.append(logits)
    return outcome(model, torch.cat(outputs, 1), state, after)


def one_by_one(model: Model, rows: Rows, state: LMState) -> dict[str, Tensor]:
    """`packed`, computed document by document without masks; the logits at padding are 0."""
    state = differentiable(state)
    outputs, finals = [], []
    for row, (tokens, is_token, starts) in enumerate(zip(*rows, strict=True)):
        after = states.take(state, [row])
        times = is_token.nonzero()[:, 0].tolist()
        bounds = [i for i, time in enumerate(times) if starts[time] or i == 0]
        logits = torch.zeros(len(tokens), VOCAB, dtype=next(model.parameters()).dtype)
        for first, last in pairwise([*bounds, len(times)]):
            document = times[first:last]
            if starts[document[0]]:
                after = model.init_state(1)
            found, after = model(tokens[None, document], after)
            logits = logits.index_copy(0, torch.tensor(document), found[0])
        outputs.append(logits)
        finals.append(after)
    return outcome(model, torch.stack(outputs), state, states.join(finals))


def outcome(model: Model, logits: Tensor, state: LMState, after: LMState) -> dict[str, Tensor]:
    inputs = {**real_leaves(state, "state."), **parameters(model)}
    result = {"logits": logits, "position": after.position, **real_leaves(after, "final ")}
    return result | gradients((logits, after), inputs)


def build(
    specs: Sequence[dict[str, Any]], mixer: dict[str, Any], position: str, block: str, **more: Any
) -> Model:
    if specs:
        return build_mitigated(specs, mixer, position=position, block=block, **more)
    return build_model(mixer, position, block, **more)


CASES = {spec_id(spec): ([], spec) for spec in MIXER_SPECS} | {
    f"{spec_id(spec)}-{mixer['kind']}{'-' * bool(backend)}{backend}": (
        [spec],
        mixer | ({"backend": backend} if backend else {}),
    )
    for spec, mixer in DEFINED
    for backend in (BACKENDS if issubclass(MIXERS[mixer["kind"]], ScanningMixer) else [""])
}
every_case = pytest.mark.parametrize(("specs", "mixer"), CASES.values(), ids=CASES)


@pytest.mark.parametrize(("specs", "mixer", "position"), with_positions(CASES))
def test_documents_are_those_of_separate_rows(
    specs: list[dict[str, Any]], mixer: dict[str, Any], position: str
) -> None:
    """Every cell, position and mitigation, in one call and in pieces, over several chunks."""
    small = is_interpreted(mixer)
    model = build(specs, mixer, position, "residual", n_layers=1 if small else 2)
    batch, time, pieces = (2, 17, [1, 9, 7]) if small else (3, 37, [1, 13, 1, 22])
    rows = draw_rows(batch, time, seed=1)
    with small_chunks():
        state = started(model, batch, seed=2)
        expected = one_by_one(model, rows, state)
        for sizes in ([time], pieces):
            assert_same(packed(model, rows, state, sizes), expected, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@every_case
@settings(max_examples=3)
@given(
    sizes=splits(empty=True, longest=50),
    batch=st.integers(1, 4),
    seed=seeds,
    position=st.sampled_from(POSITION_KINDS),
    block=st.sampled_from(BLOCK_KINDS),
    chunk=st.sampled_from([4, 64]),
    both=st.sampled_from(["is_token", "is_document_start", None]),
)
def test_any_split_of_packed_rows_gives_the_same(
    specs: list[dict[str, Any]],
    mixer: dict[str, Any],
    dtype: torch.dtype,
    sizes: list[int],
    batch: int,
    seed: int,
    position: str,
    block: str,
    chunk: int,
    both: str | None,
) -> None:
    """Random rows and pieces; one of the masks may be trivial."""
    small = is_interpreted(mixer)
    if small:
        sizes, batch = [min(size, 6) for size in sizes[:3]], min(batch, 2)
        assume(sum(sizes))
    layers = 1 if small else 2
    model = build(specs, mixer, position, block, dtype=dtype, seed=seed, n_layers=layers)
    rows = draw_rows(batch, sum(sizes), seed)
    if both == "is_token":
        everywhere = torch.ones_like(rows.is_token)
        rows = rows._replace(tokens=rows.tokens % VOCAB, is_token=everywhere)
    elif both == "is_document_start":
        rows = rows._replace(is_document_start=torch.zeros_like(rows.is_token))
    with small_chunks(chunk):
        state = started(model, batch, seed)
        expected = one_by_one(model, rows, state)
        assert_same(packed(model, rows, state, sizes), expected, dtype)


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_segments_do_not_change_packed_rows(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is processed in several segments gives what its documents give."""
    monkeypatch.setattr(segments, "segment_tokens", lambda d_model: 1)
    model, rows = build_model(spec, "learned"), draw_rows(2, LONGEST, seed=3)
    state = started(model, 2, seed=4)
    found = packed(model, rows, state, [LONGEST])
    assert_same(found, one_by_one(model, rows, state), torch.float64)


def test_the_packed_kernel_of_an_lstm_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, documents go through the kernel for packed sequences; both ways agree."""
    monkeypatch.setattr(LSTM, "packs_on_cpu", True)
    model, rows = build_model("lstm"), draw_rows(3, 70, seed=5)
    state = started(model, 3, seed=6)
    found = packed(model, rows, state, [70])
    assert_same(found, one_by_one(model, rows, state), torch.float64)


@every_case
def test_padding_is_not_read(specs: list[dict[str, Any]], mixer: dict[str, Any]) -> None:
    """Rows of padding keep their state bit for bit, and logits and gradients of padding are 0."""
    model = build(specs, mixer, "learned", "residual")
    state, rows = started(model, 2, seed=7), draw_rows(2, 9, seed=8)
    nothing = torch.zeros(2, 9, dtype=torch.bool)
    logits, after = model(rows.tokens, state, is_token=nothing)
    assert_trees_equal(after, state)
    assert logits.shape == (2, 9, VOCAB)
    assert not logits.any()
    one = nothing.clone()
    one[0, 4] = True
    logits, after = model(rows.tokens % VOCAB, state, is_token=one)
    assert not logits[~one].any()
    assert_trees_equal(states.take(after, [1]), states.take(state, [1]))


@every_case
def test_a_document_with_nan_does_not_reach_the_next(
    specs: list[dict[str, Any]], mixer: dict[str, Any]
) -> None:
    """Nor does a given state with NaN, whose gradients stay finite too."""
    model = build(specs, mixer, "sinusoidal", "residual")
    nan, time = VOCAB - 1, 30
    tokens = random_tokens(2, time, seed=9) % nan
    starts = torch.zeros(2, time, dtype=torch.bool)
    starts[:, [0, 7, 15]] = True
    state = started(model, 2, seed=10)
    broken = states.clone(state)
    for _, leaf in leaves(broken):
        if leaf.is_floating_point():
            leaf.fill_(torch.nan)
    expected = packed(model, Rows(tokens, torch.ones_like(starts), starts), state, [time])
    found = packed(model, Rows(tokens, torch.ones_like(starts), starts), broken, [time])
    assert_same(found, expected, torch.float64)

    with torch.no_grad():
        model.get_parameter(EMBEDDING[bool(specs)])[nan] = torch.nan
        tokens[0, 9] = nan
        is_token = torch.ones_like(starts)
        is_token[1, 9] = False
        tokens[1, 9] = nan
        with small_chunks():
            logits, after = model(tokens, state=None, is_document_start=starts, is_token=is_token)
    finite = torch.ones_like(starts)
    finite[0, 9:15] = False
    finite[1, 9] = True
    logits = logits[..., :nan]  # the head is the embedding
    assert torch.equal(logits.isfinite().all(-1), finite)
    assert all(leaf.isfinite().all() for _, leaf in leaves(after))
    with small_chunks():
        alone = model(tokens[:, 15:]).logits[..., :nan]
    assert_near(logits[:, 15:], alone, 1e-10)


@pytest.mark.parametrize("keep", [0, 1, 5, 20])
@pytest.mark.parametrize("kind", list(MIXERS))
def test_keep_counts_tokens_as_given(kind: str, keep: int) -> None:
    """The last `keep` columns, padding included."""
    model, rows = build_model(kind, "learned"), draw_rows(3, 20, seed=11)
    whole = model(rows.tokens, **rows.masks)
    last = model(rows.tokens, keep=keep, **rows.masks)
    assert_near(last.logits, whole.logits[:, 20 - keep :], 1e-12)
    assert_trees_equal(last.state, whole.state)
