"""The recurrence over the last w inputs in Triton kernels, beside its definition and torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import state as states
from longrnn.ops import triton as kernels
from longrnn.ops.ssd import BACKENDS, SSD, ScanInputs, chunked, triton, window, window_triton
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import WindowCarry, init_carry, shape_in
from tests.contracts.builders import (
    TOLERANCE,
    assert_near,
    assert_same,
    build_mitigated,
    functional,
    generator,
    mitigation_spec,
    model_outcome,
    random_start,
    random_tokens,
    recurrent,
    small_chunks,
)
from tests.ops.test_native_window import assert_all_near, definition

pytestmark = pytest.mark.skipif(not kernels.available(), reason=str(kernels.missing()))
DEVICE = "cpu" if kernels.interpreting() else "cuda"
# Window, tokens per chunk of the carry, and calls: windows below, at and above a chunk; several
# blocks; chunks of less than a tile of the kernels, and of several; calls longer than the window,
# and calls that begin inside a chunk.
CASES = [
    (1, 1, [3]),
    (14, 4, [3, 9, 11]),
    (16, 16, [40]),
    (17, 16, [37]),
    (40, 16, [20, 1, 15, 34]),
    (64, 16, [37, 53]),
    (70, 40, [33, 1, 56]),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens."""
    monkeypatch.setattr(triton, "CHUNK", 16)


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the torch implementation runs."""
    monkeypatch.setattr(window, "_run", lambda *_: pytest.fail("computed in torch"))


def draw(time: int, *, rows: int = 1) -> tuple[ScanInputs, Tensor]:
    """Inputs of two heads in one group, one of which forgets within tokens; and a state."""
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=randomness, dtype=torch.float64).to(DEVICE)

    log_decay = -normal(time, 2).square()
    log_decay[..., 0] *= 1e-2
    wide = normal(time, 2 * 3 + 10)  # as the convolution returns x, B and C
    x, B, C = wide.split([6, 5, 5], dim=-1)
    inputs = x.unflatten(2, (2, 3)), normal(time, 2), log_decay, B[:, :, None], C[:, :, None]
    return ScanInputs(*inputs), normal(2, 3, 5)


def empty(inputs: ScanInputs, state: Tensor, w: int, chunk: int) -> WindowCarry:
    return init_carry(ScanInputs(*(tensor[0, :1] for tensor in inputs)), state, w, chunk)


def in_pieces(
    inputs: ScanInputs, carry: WindowCarry, w: int, sizes: Sequence[int], *ssds: SSD
) -> tuple[Tensor, Tensor, WindowCarry]:
    """Computes one piece after the other, with the given backends by turns."""
    outputs, state = [], carry.back
    pieces = zip(*(tensor.split(list(sizes), dim=1) for tensor in inputs), strict=True)
    for number, piece in enumerate(pieces):
        ssd = ssds[number % len(ssds)]
        y, state, carry = windowed_ssd(ScanInputs(*piece), carry, w, ssd)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state, carry


@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize(
    ("w", "chunk", "sizes", "dtype"),
    [
        *((*case, torch.float64) for case in CASES),
        *((*case, torch.float32) for case in (CASES[1], CASES[4])),
    ],
)
def test_every_split_gives_the_definition(
    w: int, chunk: int, sizes: list[int], dtype: torch.dtype
) -> None:
    """y and the state; what was in a given state is outside every window."""
    inputs, state = draw(sum(sizes))
    wanted = [part.to(dtype) for part in definition(inputs, w)]
    narrow = ScanInputs(*(tensor.to(dtype) for tensor in inputs))
    carry = empty(narrow, state.to(dtype), w, chunk)
    y, final, _ = in_pieces(narrow, carry, w, sizes, triton.ssd)
    assert_near(y, wanted[0], TOLERANCE[dtype])
    assert_near(final, wanted[1], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("w", "chunk", "sizes"),
    [CASES[4], *(pytest.param(*case, marks=pytest.mark.slow) for case in (CASES[1], CASES[6]))],
)
def test_carries_are_those_of_torch_and_either_continues_the_other(
    w: int, chunk: int, sizes: list[int]
) -> None:
    inputs, state = draw(sum(sizes))
    carry = empty(inputs, state, w, chunk)
    wanted = in_pieces(inputs, carry, w, [sum(sizes)], chunked.ssd)
    for by_turns in ([triton.ssd], [triton.ssd, chunked.ssd], [chunked.ssd, triton.ssd]):
        assert_all_near(in_pieces(inputs, carry, w, sizes, *by_turns), wanted, 1e-11)


@pytest.mark.parametrize(("w", "chunk", "sizes"), [CASES[1], CASES[4]])
def test_gradients_are_those_of_torch(w: int, chunk: int, sizes: list[int]) -> None:
    """Of all inputs and of a carry, through the outputs and the new carry of several calls."""
    inputs, state = draw(sum(sizes) + 30)
    before = empty(inputs, state, w, chunk)
    _, _, before = windowed_ssd(inputs.slice(0, 30), before, w, chunked.ssd)
    found = []
    for ssd in (triton.ssd, chunked.ssd):
        given = states.tree_map(
            lambda leaf: leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf,
            (inputs.slice(30, 30 + sum(sizes)), before),
        )
        result = in_pieces(*given, w, sizes, ssd)
        leaves = [leaf for _, leaf in states.leaves(given) if leaf.is_floating_point()]
        found.append(torch.autograd.grad(functional(result, 3), leaves, materialize_grads=True))
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-10, scale=1.0)


@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize(
    ("w", "chunk", "time", "rows"),
    [(11, 4, 6, 2), *(pytest.param(34, 16, 21, rows, marks=pytest.mark.slow) for rows in (1, 2))],
)
def test_gradients_of_the_inputs_through_the_outputs_are_computed_in_kernels(
    w: int, chunk: int, time: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training, where the carry is detached; one row after another where states are large."""
    known = 2 * w + 1
    inputs, state = draw(known + time, rows=rows)
    before = windowed_ssd(inputs.slice(0, known), empty(inputs, state, w, chunk), w, triton.ssd)[2]
    monkeypatch.setattr(window_triton, "BYTES_AT_ONCE", 1)
    given = [tensor.clone().requires_grad_() for tensor in inputs.slice(known, known + time)]
    y = windowed_ssd(ScanInputs(*given), before, w, triton.ssd)[0]
    weights = torch.randn(y.shape, generator=generator(5), dtype=y.dtype).to(y.device)
    found = torch.autograd.grad((y * weights).sum(), given)
    joined = (
        torch.cat([tensor[:, :known], leaf], dim=1)
        for tensor, leaf in zip(inputs, given, strict=True)
    )
    wanted = (definition(ScanInputs(*joined), w)[0][:, known:] * weights).sum()
    for ours, exact in zip(found, torch.autograd.grad(wanted, given), strict=True):
        assert_near(ours, exact, 1e-10)


def test_a_call_with_gradients_keeps_its_inputs_and_its_carry_alone() -> None:
    """The torch path keeps scores, decays and states of every chunk."""
    inputs, state = draw(64)
    carry = empty(inputs, state, 40, 16)
    kept = {}
    for ssd in (triton.ssd, chunked.ssd):
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        leaves = ScanInputs(*(tensor.clone().requires_grad_() for tensor in inputs))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            windowed_ssd(leaves, carry, 40, ssd)
        kept[ssd] = sum(saved.values())
    given = sum(leaf.numel() * 8 for _, leaf in states.leaves((inputs, carry)))
    assert kept[triton.ssd] <= given < kept[chunked.ssd] / 2


def test_second_derivatives_equal_those_of_torch() -> None:
    inputs, state = draw(9)
    found = []
    for ssd in (triton.ssd, chunked.ssd):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        y, *_ = windowed_ssd(ScanInputs(*leaves), empty(inputs, state, 4, 4), 4, ssd)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad([one.square().sum() for one in first], leaves))
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-9)


def test_a_call_changes_no_carry_that_was_kept() -> None:
    inputs, state = draw(60)
    _, _, kept = windowed_ssd(inputs.slice(0, 30), empty(inputs, state, 40, 8), 40, triton.ssd)
    before = states.clone(kept)
    for stop in (31, 60):
        windowed_ssd(inputs.slice(30, stop), kept, 40, triton.ssd)
    for (_, one), (_, other) in zip(states.leaves(kept), states.leaves(before), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("only_kernels")
def test_rows_at_different_phases_are_computed_in_groups() -> None:
    """As after the reset of one row."""
    inputs, state = draw(40, rows=2)
    start = empty(inputs, state, 20, 8)
    _, _, carry = windowed_ssd(inputs.slice(0, 13), start, 20, triton.ssd)
    carry = states.reset(carry, start, torch.tensor([False, True], device=DEVICE))
    y, final, _ = windowed_ssd(inputs.slice(13, 40), carry, 20, triton.ssd)
    for row, first in ((0, 0), (1, 13)):
        one = ScanInputs(*(tensor[row : row + 1, first:] for tensor in inputs))
        wanted = definition(one, 20)
        assert_near(y[row : row + 1], wanted[0][:, 13 - first :], 1e-11)
        assert_near(final[row : row + 1], wanted[1], 1e-11)


@pytest.mark.parametrize("value", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow)])
def test_what_is_not_finite_is_computed_by_torch(value: float) -> None:
    """It leaves the outputs once the token that held it has left the window."""
    inputs, state = draw(40, rows=2)
    x = inputs.x.clone()
    x[1, 5] = value
    bad, carry = inputs._replace(x=x), empty(inputs, state, 20, 8)
    shape = shape_in(carry, 20)
    assert (
        window_triton.windowed(bad, carry, shape, 0, lambda *_: pytest.fail("not asked for"))
        is None
    )
    y, final, _ = windowed_ssd(bad, carry, 20, triton.ssd)
    wanted = definition(inputs, 20)
    assert_near(y[0], wanted[0][0], 1e-11)
    assert_near(y[1, 25:], wanted[0][1, 25:], 1e-11)
    assert_near(final, wanted[1], 1e-11)
    assert not y[1, 5:25].isfinite().all(-1).any()


def test_a_decay_to_zero_removes_what_came_before() -> None:
    """A log decay of −∞ is computed in kernels, at the edges of windows too."""
    inputs, state = draw(44)
    inputs.log_decay[:, [7, 30]] = -torch.inf
    found, wanted = (
        in_pieces(inputs, empty(inputs, state, 21, 8), 21, [44], ssd)[:2]
        for ssd in (triton.ssd, chunked.ssd)
    )
    assert_all_near(found, wanted, 1e-11)


def test_a_training_step_computes_nothing_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The carry that a model starts from needs no gradient, nor does the one that it returns."""
    spec = {"kind": "sliding_window", "window": 5, "chunk": 4}
    found = []
    for backend in ("triton", "chunked"):
        mixer = {"kind": "mamba2", "d_state": 5, "head_dim": 16, "backend": backend}
        model = build_mitigated([spec], mixer, n_layers=1).to(DEVICE)
        with monkeypatch.context() as patch:
            if backend == "triton":
                patch.setattr(window, "_run", lambda *_: pytest.fail("computed in torch"))
            state = None
            for tokens in random_tokens(1, 12).to(DEVICE).split(6, dim=1):
                logits, state = model(tokens, state)
                logits.logsumexp(-1).square().sum().backward()
                state = model.adopt(states.detach(state))
        found.append([one.grad for one in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-10)


CHAINS: list[list[dict[str, Any]]] = [
    [mitigation_spec("sliding_window")],
    [
        mitigation_spec("forget_more"),
        mitigation_spec("scale_delta"),
        {"kind": "sliding_window", "window": 11, "chunk": 5},
        mitigation_spec("token_filter"),
    ],
]


@pytest.mark.parametrize("specs", CHAINS, ids=["some heads", "all heads, in a chain"])
def test_models_compute_what_they_compute_with_other_backends(specs: list[dict[str, Any]]) -> None:
    """Logits, states and all gradients, from a state that is not zero."""
    found: list[dict[str, Tensor]] = []
    for backend in ("triton", "chunked"):
        mixer = {"kind": "mamba2", "d_state": 6, "head_dim": 4, "backend": backend}
        model = build_mitigated(specs, mixer, n_layers=1).to(DEVICE)
        assert recurrent(model).mixers[0].ssd is BACKENDS[backend]
        tokens, start = random_tokens(1, 21).to(DEVICE), random_start(model, 1)
        with small_chunks(4):
            found.append(model_outcome(model, tokens, start, [12, 1, 8]))
    assert_same(found[0], found[1], torch.float64)
