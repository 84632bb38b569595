"""The recurrence over the last w inputs in C++, beside its definition and the torch path."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from longrnn.ops.ssd import BACKENDS, SSD, ScanInputs, chunked, window
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import WindowCarry, init_carry
from torch import Tensor

from longrnn import state as states
from tests.contracts.builders import assert_near
from tests.ops.test_native import draw, library, needs_kernels, threads

__all__ = ["library", "threads"]  # fixtures

WINDOWS = [1, 5, 63, 64, 65, 100, 128, 130, 300]
# Two rows and groups, sizes that are not multiples of the vector width; and sizes that are.
SHAPES = [(2, 387, 4, 3, 2, 5), (1, 331, 3, 16, 1, 16)]


def definition(inputs: ScanInputs, w: int) -> tuple[Tensor, Tensor]:
    """y and the last state: the decayed inputs of each token's window, summed in float64."""
    total = inputs.log_decay.cumsum(1).transpose(1, 2)
    apart = torch.arange(total.shape[2])[:, None] - torch.arange(total.shape[2])
    inside = (apart >= 0) & (apart < w)
    decay = (total[..., None] - total[..., None, :]).masked_fill(~inside, -torch.inf).exp()
    B, C = inputs.per_head(inputs.B), inputs.per_head(inputs.C)
    u = inputs.scaled_x(torch.float64)
    scores = torch.einsum("bthn,bihn->bhti", C, B) * decay
    y = torch.einsum("bhti,bihp->bthp", scores, u)
    return y, torch.einsum("bhi,bihp,bihn->bhpn", decay[:, :, -1], u, B)


def empty(inputs: ScanInputs, state: Tensor, w: int) -> WindowCarry:
    return init_carry(ScanInputs(*(tensor[0, :1] for tensor in inputs)), state, w)


def in_pieces(
    inputs: ScanInputs, carry: WindowCarry, w: int, sizes: list[int], *ssds: SSD
) -> tuple[Tensor, Tensor, WindowCarry]:
    """Computes one piece after the other, with the given backends by turns."""
    outputs, state = [], carry.back
    pieces = zip(*(tensor.split(sizes, dim=1) for tensor in inputs), strict=True)
    for number, piece in enumerate(pieces):
        ssd = ssds[number % len(ssds)]
        y, state, carry = windowed_ssd(ScanInputs(*piece), carry, w, ssd)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state, carry


def cuts(time: int, seed: int, count: int = 7) -> list[int]:
    """Random lengths of pieces, of which there is always one of a single token."""
    chosen = sorted(random.Random(seed).sample(range(2, time), count))
    return [later - before for before, later in pairwise([0, 1, *chosen, time])]


def assert_all_near(ours: Any, theirs: Any, tolerance: float) -> None:
    for (name, one), (_, other) in zip(states.leaves(ours), states.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        if one.numel():
            assert_near(one.double(), other.double(), tolerance)


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the torch implementation runs."""
    monkeypatch.setattr(window, "_run", lambda *_: pytest.fail("computed in torch"))


@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize("w", WINDOWS)
def test_every_compiled_library_gives_the_definition(library: ctypes.CDLL, w: int) -> None:
    for shape in SHAPES:
        inputs, state = draw(*shape)
        wanted = definition(inputs, w)
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 5e-6)):
            narrow = ScanInputs(*(tensor.to(dtype) for tensor in inputs))
            for sizes in ([shape[1]], cuts(shape[1], w)):
                carry = empty(narrow, state.to(dtype), w)
                found = in_pieces(narrow, carry, w, sizes, BACKENDS["native"])
                assert_all_near(found[:2], tuple(part.to(dtype) for part in wanted), tolerance)


@needs_kernels
@pytest.mark.parametrize("w", WINDOWS)
def test_carries_are_those_of_the_torch_implementation_and_either_continues_the_other(
    w: int,
) -> None:
    """The same values, in calls that begin and end anywhere in a chunk and in a block of chunks."""
    for shape in SHAPES:
        inputs, state = draw(*shape)
        carry, sizes, native = empty(inputs, state, w), cuts(shape[1], w), BACKENDS["native"]
        wanted = in_pieces(inputs, carry, w, [shape[1]], chunked.ssd)
        for by_turns in ([native], [native, chunked.ssd], [chunked.ssd, native]):
            found = in_pieces(inputs, carry, w, sizes, *by_turns)
            assert_all_near(found, wanted, 1e-11)


@needs_kernels
@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize("sizes", [[1000], [70, 930], [512, 488]], ids=str)
def test_a_carry_keeps_no_more_of_an_input_than_its_chunks(sizes: list[int]) -> None:
    """The whole input of a long call can be freed."""
    inputs, state = draw(2, 1000, 4, 16, 1, 16)
    carry = empty(inputs, state, 200)
    *_, carry = in_pieces(inputs, carry, 200, sizes, BACKENDS["native"])
    for chunk in (*carry.recent, carry.current):
        for tensor in chunk:
            most = len(carry.recent) * tensor.numel() * tensor.element_size()
            assert tensor.untyped_storage().nbytes() <= most


@needs_kernels
def test_a_call_changes_no_carry_that_was_kept() -> None:
    inputs, state = draw(2, 300, 4, 16, 1, 16)
    native = BACKENDS["native"]
    _, _, kept = windowed_ssd(inputs.slice(0, 150), empty(inputs, state, 200), 200, native)
    before = states.clone(kept)
    for stop in (151, 170, 300):
        windowed_ssd(inputs.slice(150, stop), kept, 200, native)
    for (_, one), (_, other) in zip(states.leaves(kept), states.leaves(before), strict=True):
        assert torch.equal(one, other)


@needs_kernels
@pytest.mark.usefixtures("threads", "only_kernels")
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_the_number_of_threads_changes_no_value(heads: int) -> None:
    inputs, state = draw(1, 400, heads, 16, 1, 32)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(windowed_ssd(inputs, empty(inputs, state, 200), 200, BACKENDS["native"]))
    for other in found[1:]:
        for (_, ours), (_, first) in zip(
            states.leaves(other), states.leaves(found[0]), strict=True
        ):
            assert torch.equal(ours, first)


@needs_kernels
@pytest.mark.usefixtures("only_kernels")
def test_rows_at_different_phases_are_computed_in_groups() -> None:
    """As after the reset of one row."""
    inputs, state = draw(3, 300, 4, 3, 2, 5)
    w, native = 200, BACKENDS["native"]
    start = empty(inputs, state, w)
    _, _, carry = windowed_ssd(inputs.slice(0, 90), start, w, native)
    carry = states.reset(carry, start, torch.tensor([False, True, False]))
    y, final, _ = windowed_ssd(inputs.slice(90, 300), carry, w, native)
    for row, first in ((0, 0), (1, 90), (2, 0)):
        one = ScanInputs(*(tensor[row : row + 1, first:] for tensor in inputs))
        wanted = definition(one, w)
        assert_near(y[row : row + 1], wanted[0][:, 90 - first :], 1e-11)
        assert_near(final[row : row + 1], wanted[1], 1e-11)


@needs_kernels
def test_a_call_with_gradients_may_follow_one_without() -> None:
    inputs, state = draw(1, 300, 4, 3, 2, 5)
    w, found = 130, []
    for ssd in (BACKENDS["native"], chunked.ssd):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with torch.no_grad():
            _, _, carry = windowed_ssd(inputs.slice(0, 150), empty(inputs, state, w), w, ssd)
        y, final, _ = windowed_ssd(ScanInputs(*leaves).slice(150, 300), carry, w, ssd)
        found.append(torch.autograd.grad(y.square().sum() + final.sum(), leaves))
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-10)


@needs_kernels
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_inputs_in_a_narrow_dtype_are_kept_in_it(narrow: torch.dtype) -> None:
    wide, state = draw(2, 200, 4, 16, 1, 16)
    inputs = ScanInputs(*(tensor.float() for tensor in wide))
    inputs = inputs._replace(x=inputs.x.to(narrow), B=inputs.B.to(narrow), C=inputs.C.to(narrow))
    found = [
        in_pieces(inputs, empty(inputs, state.float(), 100), 100, [90, 110], ssd)
        for ssd in (BACKENDS["native"], chunked.ssd)
    ]
    assert found[0][2].current.x.dtype == narrow
    assert_all_near(found[0], found[1], 1e-5)
