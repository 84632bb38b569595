"""A token that is not finite changes no other row of the batch, and nothing before its chunk.

After it, its own row may be NaN; what is finite is what the definition, token after token, gives.
For every backend of the recurrence, and the recurrences of state_norm and sliding_window. For whole
models see `test_nonfinite_models`; for documents within a row, `test_packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from longrnn.ops.ssd import BACKENDS, ScanInputs
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from torch import Tensor

from longrnn.ops.window import init_stepwise, slide
from tests.contracts.builders import (
    TOLERANCE,
    WITH_KERNELS,
    assert_near,
    functional,
    generator,
    spec_id,
)

pytestmark = pytest.mark.core

Scan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
TIME, BAD, CHUNK = 150, 100, 64  # tokens, the one that is not finite, in row 1 of 3, and a chunk
SPLITS = [[TIME], [98, 1, 1, 1, 49], [BAD, TIME - BAD], [BAD + 1, TIME - BAD - 1]]
NAN, INF = torch.nan, torch.inf
# What is not finite: a field of the inputs or both that a step dt makes, and its value.
TROUBLES: list[tuple[tuple[str, ...], float]] = [
    *(((name,), value) for name in ("x", "gain", "B", "C") for value in (NAN, INF, -INF)),
    (("log_decay",), NAN),
    (("log_decay",), -INF),  # forgets everything, and is nothing bad
    (("gain", "log_decay"), NAN),
]
every_trouble = pytest.mark.parametrize(("names", "value"), TROUBLES, ids=str)


def draw(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[ScanInputs, Tensor]:
    """Three rows, four heads in two groups, and a state that is not zero."""
    randomness = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(3, *shape, generator=randomness, dtype=torch.float64)

    x, gain = normal(TIME, 4, 3), normal(TIME, 4)
    B, C = normal(TIME, 2, 5), normal(TIME, 2, 5)
    log_decay = -30 * torch.rand(3, TIME, 4, generator=randomness, dtype=torch.float64) ** 8
    inputs = ScanInputs(*(tensor.to(dtype) for tensor in (x, gain, log_decay, B, C)))
    return inputs, normal(4, 3, 5).to(dtype)


def with_trouble(inputs: ScanInputs, names: tuple[str, ...], value: float) -> ScanInputs:
    """One entry of each field at token BAD of row 1."""
    fields = inputs._asdict()
    for name in names:
        fields[name] = fields[name].clone()
        fields[name][1, BAD].view(-1)[1] = value
    return ScanInputs(**fields)


def step(inputs: ScanInputs, t: int, state: Tensor) -> Tensor:
    """exp(log_decay_t) state + gain_t x_t B_t^T."""
    B = inputs.B[:, t].repeat_interleave(inputs.x.shape[2] // inputs.B.shape[2], dim=1)
    kept = inputs.log_decay[:, t].exp()[..., None, None] * state
    x = inputs.x[:, t] * inputs.gain[:, t, :, None]
    return kept + x[..., None] * B[:, :, None]


def read(inputs: ScanInputs, t: int, state: Tensor) -> Tensor:
    C = inputs.C[:, t].repeat_interleave(inputs.x.shape[2] // inputs.C.shape[2], dim=1)
    return (state @ C[..., None])[..., 0]


def loop(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token."""
    y = []
    for t in range(inputs.x.shape[1]):
        state = step(inputs, t, state)
        y.append(read(inputs, t, state))
    return torch.stack(y, 1), state


def assert_right_where_finite(
    actual: Tensor, expected: Tensor, name: str, dtype: torch.dtype = torch.float64
) -> None:
    """NaN or infinity never becomes a number: what is finite is finite and near as expected."""
    finite = actual.isfinite()
    assert expected[finite].isfinite().all(), name
    assert_near(actual[finite], expected[finite], TOLERANCE[dtype], name)


def in_pieces(scan: Scan, inputs: ScanInputs, state: Tensor, sizes: list[int]) -> tuple[Any, Any]:
    outputs = []
    for piece in zip(*(tensor.split(sizes, dim=1) for tensor in inputs), strict=True):
        y, state = scan(ScanInputs(*piece), state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def assert_contained(
    scan: Scan,
    definition: Callable[[ScanInputs], tuple[Tensor, Tensor]],
    trouble: tuple[tuple[str, ...], float],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Of the recurrence in pieces, which begin with a state that is not zero."""
    clean, state = draw(dtype)
    inputs = with_trouble(clean, *trouble)
    expected, plain = definition(inputs), definition(clean)
    for sizes in SPLITS:
        found = in_pieces(scan, inputs, state, sizes)
        for name, ours, theirs in zip(("y", "state"), found, expected, strict=True):
            assert_right_where_finite(ours, theirs, f"{name} {sizes}", dtype)
        for ours, theirs in zip(found, plain, strict=True):
            assert_near(ours[[0, 2]], theirs[[0, 2]], TOLERANCE[dtype], f"other rows {sizes}")
        call = max(start for start in accumulate([0, *sizes]) if start <= BAD)
        before = call + (BAD - call) // CHUNK * CHUNK
        assert_near(found[0][1, :before], plain[0][1, :before], TOLERANCE[dtype], str(sizes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=spec_id)
@pytest.mark.parametrize("backend", list(BACKENDS))
@every_trouble
def test_every_backend(
    backend: str, dtype: torch.dtype, names: tuple[str, ...], value: float
) -> None:
    def definition(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        return loop(inputs, draw(dtype)[1])

    assert_contained(BACKENDS[backend], definition, (names, value), dtype)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_state_that_is_not_finite(backend: str, value: float) -> None:
    """It does not reach other rows, and stays visible in its own."""
    inputs, state = draw()
    clean = loop(inputs, state)
    state[1, 2, 0, 3] = value
    expected = loop(inputs, state)
    for sizes in SPLITS:
        found = in_pieces(BACKENDS[backend], inputs, state, sizes)
        for ours, theirs, plain in zip(found, expected, clean, strict=True):
            assert_right_where_finite(ours, theirs, str(sizes))
            assert_near(ours[[0, 2]], plain[[0, 2]], 1e-10, str(sizes))


@pytest.mark.parametrize("backend", list(BACKENDS))
@every_trouble
def test_gradients_of_other_rows(backend: str, names: tuple[str, ...], value: float) -> None:
    """They are those without the bad token."""

    def gradients(trouble: bool) -> list[Tensor]:
        inputs, state = draw()
        inputs = with_trouble(inputs, names, value) if trouble else inputs
        tensors = [tensor.clone().requires_grad_() for tensor in (*inputs, state)]
        y, final = BACKENDS[backend](ScanInputs(*tensors[:5]), tensors[5])
        loss = functional((y[[0, 2]], final[[0, 2]]), 4)
        return [gradient[[0, 2]] for gradient in torch.autograd.grad(loss, tensors)]

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert_near(ours, theirs, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=spec_id)
@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("log_decay", [-INF, -200.0])
def test_a_decay_to_zero_removes_all_earlier_inputs(
    backend: str, dtype: torch.dtype, log_decay: float
) -> None:
    """Inputs and a state of 1e30 before a decay to 0 do not affect later outputs."""
    inputs, state = draw(dtype)
    inputs.log_decay[:, 30] = log_decay
    large = inputs._replace(x=inputs.x.clone())
    large.x[:, :30] *= 1e30
    late = ScanInputs(*(tensor[:, 30:] for tensor in inputs))
    expected = loop(late, torch.zeros_like(state))
    for sizes in ([TIME], [20, 1, 129], [30, 120], [31, 1, 118]):
        y, final = in_pieces(BACKENDS[backend], large, 1e30 * state, sizes)
        assert_near(y[:, 30:], expected[0], TOLERANCE[dtype])
        assert_near(final, expected[1], TOLERANCE[dtype])


LIMIT = torch.tensor([0.5, 2.0, 1e3, UNLIMITED], dtype=torch.float64)


def limited_loop(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """state_norm's recurrence: h_t = ĥ_t · min(1, p / ‖ĥ_t‖)."""
    y, state = [], draw()[1]
    for t in range(inputs.x.shape[1]):
        wide = step(inputs, t, state)
        norm = wide.square().sum((2, 3), keepdim=True).sqrt()
        scaled = wide * (LIMIT[:, None, None] / norm).clamp(max=1)
        state = torch.where(LIMIT[:, None, None] < UNLIMITED, scaled, wide)
        y.append(read(inputs, t, state))
    return torch.stack(y, 1), state


@pytest.mark.parametrize("backend", WITH_KERNELS)
@every_trouble
def test_state_norm(backend: str, names: tuple[str, ...], value: float) -> None:
    """For heads with limits that are reached, high, or absent."""

    def scan(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return rescaled_ssd(inputs, state, LIMIT, BACKENDS[backend])

    assert_contained(scan, limited_loop, (names, value))


@cache
def windowed_loop(r: int, trouble: tuple[tuple[str, ...], float] | None) -> tuple[Tensor, Tensor]:
    """Outputs and final state of the definition of a window, for all backends."""
    inputs, state = draw()
    inputs = inputs if trouble is None else with_trouble(inputs, *trouble)
    # The decay of a window's first token is of what is outside.
    first = inputs._replace(log_decay=torch.zeros_like(inputs.log_decay))
    y = []
    for t in range(TIME):
        state = torch.zeros_like(state)
        for number, i in enumerate(range(max(0, t - r + 1), t + 1)):
            state = step(inputs if number else first, i, state)
        y.append(read(inputs, t, state))
    return torch.stack(y, 1), state


@pytest.mark.parametrize("backend", WITH_KERNELS)
@pytest.mark.parametrize("r", [1, 4, 13, 40])
@every_trouble
def test_sliding_window(r: int, backend: str, names: tuple[str, ...], value: float) -> None:
    """At the latest three windows after it, the bad token has no effect."""
    inputs, start = draw()
    bad = with_trouble(inputs, names, value)
    expected, plain = windowed_loop(r, (names, value)), windowed_loop(r, None)
    for sizes in SPLITS:
        like = ScanInputs(*(tensor[0, :1] for tensor in inputs))
        carry, outputs, after = init_carry(like, torch.zeros_like(start), r), [], start
        for piece in zip(*(tensor.split(sizes, 1) for tensor in bad), strict=True):
            part, after, carry = windowed_ssd(ScanInputs(*piece), carry, r, BACKENDS[backend])
            outputs.append(part)
        y = torch.cat(outputs, 1)
        for name, ours, theirs in zip(("y", "state"), (y, after), expected, strict=True):
            assert_right_where_finite(ours, theirs, f"{name} {sizes}")
        assert_near(y[[0, 2]], plain[0][[0, 2]], 1e-10, f"other rows {sizes}")
        assert_near(after[[0, 2]], plain[1][[0, 2]], 1e-10, f"other rows {sizes}")
        assert_near(y[1, BAD + 3 * r :], plain[0][1, BAD + 3 * r :], 1e-10, f"later {sizes}")


@pytest.mark.parametrize("r", [1, 2, 5, 8])
@pytest.mark.parametrize("trouble", ["keep", "add"])
def test_sliding_window_of_a_vector(r: int, trouble: str) -> None:
    """The memory of a stepwise cell is finite again once the token has left the window."""
    randomness = generator(1)
    terms = {name: torch.rand(3, 30, 4, generator=randomness) for name in ("keep", "add")}
    terms[trouble][1, 12, 2] = NAN
    carry = init_stepwise(torch.zeros(3, 4), r)
    for t in range(30):
        memory, carry = slide(terms["keep"][:, t], terms["add"][:, t], carry)
        expected = torch.zeros(3, 4)
        for number, i in enumerate(range(max(0, t - r + 1), t + 1)):
            kept = terms["keep"][:, i] * expected if number else 0
            expected = kept + terms["add"][:, i]
        assert torch.equal(memory.isnan(), expected.isnan()), f"token {t}"
        assert_right_where_finite(memory, expected, f"token {t}", torch.float32)
