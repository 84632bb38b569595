"""Tokens of a window whose phase is on the device equal the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrnn import state as states
from longrnn.ops.ssd import ScanInputs, chunked
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import WindowCarry, init_carry
from longrnn.ops.ssd.window_step import carry_after, static_window, step, tokens_left
from tests.contracts.builders import TOLERANCE, assert_near, generator
from tests.ops.test_native_window import definition

EVERY = pytest.mark.parametrize("backend", ["chunked"])
# Window, tokens per chunk, and tokens before those that are decoded: no token between two borders;
# one chunk, and several between; a rest of almost a chunk; chunks of more than one tile.
SHAPES = [(1, 1, 3), (2, 2, 5), (14, 4, 31), (11, 4, 30), (70, 40, 115)]
DECODED = 10


def draw(time: int, device: torch.device, dtype: torch.dtype = torch.float64) -> ScanInputs:
    """Inputs of two rows, and of four heads in two groups, one of which forgets within tokens."""
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, time, *shape, generator=randomness, dtype=torch.float64)

    log_decay = -normal(4).square()
    log_decay[..., 0] *= 1e-2
    inputs = normal(4, 3), normal(4), log_decay, normal(2, 5), normal(2, 5)
    return ScanInputs(*(tensor.to(device, dtype) for tensor in inputs))


def device_of(backend: str) -> torch.device:
    return torch.device("cpu")


def empty(inputs: ScanInputs, w: int, chunk: int) -> WindowCarry:
    like = ScanInputs(*(tensor[0, :1] for tensor in inputs))
    state = torch.randn(2, 4, 3, 5, generator=generator(1), dtype=torch.float64).to(inputs.x)
    return init_carry(like, state, w, chunk)


def after(inputs: ScanInputs, time: int, w: int, chunk: int) -> WindowCarry:
    """The carry after the first tokens."""
    return windowed_ssd(inputs.slice(0, time), empty(inputs, w, chunk), w, chunked.ssd)[2]


def decode(
    inputs: ScanInputs, carry: WindowCarry, w: int, backend: str
) -> tuple[Tensor, Tensor, WindowCarry, int]:
    """Computes one token after another, and counts those that end a chunk of a row."""
    outputs, borders, state = [], 0, carry.back
    static = static_window(carry, w)
    for token in inputs.tokens():
        if (tokens_left(carry_after(carry, static), w) > 0).all():
            y, state, static = step(token, static)
        else:
            borders += 1
            y, state, carry = windowed_ssd(token, carry_after(carry, static), w, chunked.ssd)
            static = static_window(carry, w)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state, carry_after(carry, static), borders


@EVERY
@pytest.mark.parametrize(("w", "chunk", "known"), SHAPES)
def test_tokens_give_the_definition_and_the_carry_of_calls(
    w: int, chunk: int, known: int, backend: str
) -> None:
    """Over the end of a chunk; all but its last token are computed without the phase."""
    end = known + DECODED
    inputs = draw(end, device_of(backend))
    given = after(inputs, known, w, chunk)
    kept = states.clone(given)
    y, state, carry, borders = decode(inputs.slice(known, end), given, w, backend)
    wanted = definition(inputs, w)
    assert_near(y, wanted[0][:, known:], 1e-11)
    assert_near(state, wanted[1], 1e-11)
    assert borders == end // chunk - known // chunk

    called = after(inputs, end, w, chunk)
    pairs = zip(states.leaves(carry), states.leaves(called), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert_near(ours, theirs, 1e-11, name)
    for (name, one), (_, other) in zip(states.leaves(given), states.leaves(kept), strict=True):
        assert torch.equal(one, other), name


@EVERY
def test_tokens_in_float32_have_its_accuracy(backend: str) -> None:
    narrow = draw(36, device_of(backend), torch.float32)
    y, state, _, _ = decode(narrow.slice(30, 36), after(narrow, 30, 14, 4), 14, backend)
    wanted = definition(ScanInputs(*(tensor.double() for tensor in narrow)), 14)
    assert_near(y, wanted[0][:, 30:].float(), TOLERANCE[torch.float32])
    assert_near(state, wanted[1].float(), TOLERANCE[torch.float32])


@EVERY
def test_rows_may_be_at_different_phases(backend: str) -> None:
    """As after the reset of one row; each row ends its chunks at its own tokens."""
    inputs = draw(24, device_of(backend))
    is_new = torch.tensor([False, True], device=inputs.x.device)
    carry = states.reset(after(inputs, 14, 11, 4), empty(inputs, 11, 4), is_new)
    y, state, _, borders = decode(inputs.slice(14, 24), carry, 11, backend)
    assert borders == 3 + 2
    for row, first in ((0, 0), (1, 14)):
        one = ScanInputs(*(tensor[row : row + 1, first:] for tensor in inputs))
        wanted = definition(one, 11)
        assert_near(y[row : row + 1], wanted[0][:, 14 - first :], 1e-11)
        assert_near(state[row : row + 1], wanted[1], 1e-11)


@EVERY
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_leaves_with_its_token(value: float, backend: str) -> None:
    """Tokens outside the window are not multiplied by 0, and neither are unused slots."""
    inputs = draw(22, device_of(backend))
    wanted = definition(inputs, 11)
    inputs.x[1, 9] = value
    inputs.B[1, 9] = value
    y, state, _, _ = decode(inputs.slice(8, 22), after(inputs, 8, 11, 4), 11, backend)
    assert_near(y[0], wanted[0][0, 8:], 1e-11)
    assert_near(y[1, 12:], wanted[0][1, 20:], 1e-11)
    assert_near(state, wanted[1], 1e-11)
    assert not y[1, 1:12].isfinite().all(-1).any()


@EVERY
def test_a_decay_to_zero_removes_what_came_before(backend: str) -> None:
    """A log decay of −∞ has the effect that it has in calls."""
    inputs = draw(22, device_of(backend))
    inputs.log_decay[:, [5, 13]] = -torch.inf
    y, state, _, _ = decode(inputs.slice(12, 22), after(inputs, 12, 14, 4), 14, backend)
    called = windowed_ssd(inputs, empty(inputs, 14, 4), 14, chunked.ssd)
    assert_near(y, called[0][:, 12:], 1e-11)
    assert_near(state, called[1], 1e-11)


@EVERY
def test_tokens_past_the_chunk_write_nowhere_else(backend: str) -> None:
    """The warm-up of a graph consumes tokens that are then taken back."""
    inputs = draw(12, device_of(backend))
    static = static_window(after(inputs, 7, 14, 4), 14)
    before = states.clone(static)
    for token in inputs.slice(7, 12).tokens():
        static = step(token, static)[2]
    for ours, theirs in zip(static.older, before.older, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(static.start, before.start)
    for ours, theirs in zip(static.current, before.current, strict=True):
        assert torch.equal(ours[:, :3], theirs[:, :3])


@EVERY
def test_buffers_hold_the_chunks_that_a_token_reads(backend: str) -> None:
    """Of a carry with many chunks and states: three chunks and one state, and decays."""
    inputs = draw(4, device_of(backend))
    carry = empty(inputs, 200, 4)
    one_chunk, one_state = states.nbytes(carry.current), states.nbytes(carry.back)
    static = states.nbytes(static_window(carry, 200))
    assert static <= 3 * one_chunk + one_state + 2 * 8
    assert static < states.nbytes(carry) / 30
