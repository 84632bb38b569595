"""A token that is not finite changes nothing before it, and no other row of the batch.

From it on, everything is NaN or infinite where the definition, token after token, has it so, at
every split: for every backend of the recurrence, and the recurrences of state_norm and
sliding_window. For whole models see `test_nonfinite_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.ops.ssd import BACKENDS, ScanInputs
from longrnn.ops.ssd.rescale import LIMITED, UNLIMITED, rescaled_ssd
from longrnn.ops.ssd.window import WINDOWED, windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from longrnn.ops.triton import interpreting
from longrnn.ops.window import init_stepwise, slide
from tests.contracts.builders import (
    TOLERANCE,
    assert_near,
    functional,
    generator,
    small_chunks,
    spec_id,
    with_kernels,
)

pytestmark = pytest.mark.core

Scan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
TIME, BAD = 37, 22  # tokens, and the one that is not finite, in row 1 of 3
SPLITS = [[TIME], [20, 1, 1, 1, 14], [BAD, TIME - BAD], [BAD + 1, TIME - BAD - 1], [1] * TIME]
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


def assert_equal_or_both_not_finite(
    actual: Tensor, expected: Tensor, name: str, *, nan: bool = True, dtype: Any = torch.float64
) -> None:
    """Near where finite; NaN where NaN, and not finite where not finite."""
    assert torch.equal(actual.isfinite(), expected.isfinite()), name
    if nan:
        assert torch.equal(actual.isnan(), expected.isnan()), name
    finite = expected.isfinite()
    assert_near(actual[finite], expected[finite], TOLERANCE[dtype], name)


def in_pieces(scan: Scan, inputs: ScanInputs, state: Tensor, sizes: list[int]) -> tuple[Any, Any]:
    outputs = []
    for piece in zip(*(tensor.split(sizes, dim=1) for tensor in inputs), strict=True):
        y, state = scan(ScanInputs(*piece), state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def splits_of(backend: str) -> list[list[int]]:
    """`SPLITS`, without the one of single tokens for kernels in Triton's interpreter.

    It would take as long as all others, which have single tokens at the bad one.
    """
    return SPLITS[:-1] if backend == "triton" and interpreting() else SPLITS


@pytest.mark.parametrize(
    ("backend", "dtype", "chunk"),
    [
        (backend, dtype, chunk)
        for backend, dtype, chunk in product(BACKENDS, (torch.float64, torch.float32), (4, 64))
        # The kernels take several segments with the one, and one with the other.
        if backend != "triton" or (dtype == torch.float64) == (chunk == 4)
    ],
    ids=spec_id,
)
@every_trouble
def test_every_backend(
    backend: str, dtype: torch.dtype, chunk: int, names: tuple[str, ...], value: float
) -> None:
    """Values equal the loop; earlier tokens and other rows are those without the bad token."""
    clean, state = draw(dtype)
    inputs = with_trouble(clean, names, value)
    expected = loop(inputs, state)
    with small_chunks(chunk):
        whole = BACKENDS[backend](inputs, state)
        for sizes in splits_of(backend):
            actual = in_pieces(BACKENDS[backend], inputs, state, sizes)
            for name, ours, theirs in zip(("y", "state"), actual, expected, strict=True):
                assert_equal_or_both_not_finite(ours, theirs, f"{name} {sizes}", dtype=dtype)
        y, final = BACKENDS[backend](clean, state)
    for row in (0, 2):
        # Closer than another order of the sums.
        assert_near(whole[0][row], y[row], TOLERANCE[dtype] / 10)
        assert_near(whole[1][row], final[row], TOLERANCE[dtype] / 10)
    assert_near(whole[0][1, :BAD], y[1, :BAD], TOLERANCE[dtype])


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_state_that_is_not_finite(backend: str, value: float) -> None:
    """It stays NaN or infinite, and does not reach other rows or heads."""
    inputs, state = draw()
    state[1, 2, 0, 3] = value
    expected = loop(inputs, state)
    for sizes in splits_of(backend):
        actual = in_pieces(BACKENDS[backend], inputs, state, sizes)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_equal_or_both_not_finite(ours, theirs, str(sizes))


@pytest.mark.parametrize("backend", list(BACKENDS))
@every_trouble
def test_gradients_of_every_backend(backend: str, names: tuple[str, ...], value: float) -> None:
    """Gradients of finite outputs equal those of the loop wherever these are finite."""

    def gradients(scan: Scan) -> dict[str, Tensor]:
        inputs, state = draw()
        tensors = [t.clone().requires_grad_() for t in (*with_trouble(inputs, names, value), state)]
        y, _ = scan(ScanInputs(*tensors[:5]), tensors[5])
        loss = functional(y[1, :BAD], 3) + functional(y[[0, 2]], 4)
        names_of_all = [*ScanInputs._fields, "state"]
        return dict(zip(names_of_all, torch.autograd.grad(loss, tensors), strict=True))

    expected = gradients(loop)
    with small_chunks():
        actual = gradients(BACKENDS[backend])
    for name, theirs in expected.items():
        finite = theirs.isfinite()
        assert finite[[0, 2]].all()
        assert_near(actual[name][finite], theirs[finite], 1e-10, name)


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
    for sizes in splits_of(backend):
        y, final = in_pieces(BACKENDS[backend], large, 1e30 * state, sizes)
        assert_near(y[:, 30:], expected[0], TOLERANCE[dtype])
        assert_near(final, expected[1], TOLERANCE[dtype])


def limited_loop(limit: Tensor) -> Scan:
    """state_norm's recurrence: h_t = ĥ_t · min(1, p / ‖ĥ_t‖)."""

    def scan(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        y = []
        for t in range(inputs.x.shape[1]):
            wide = step(inputs, t, state)
            norm = wide.square().sum((2, 3), keepdim=True).sqrt()
            scaled = wide * (limit[:, None, None] / norm).clamp(max=1)
            state = torch.where(limit[:, None, None] < UNLIMITED, scaled, wide)
            y.append(read(inputs, t, state))
        return torch.stack(y, 1), state

    return scan


@pytest.mark.parametrize("backend", with_kernels(LIMITED))
@every_trouble
def test_state_norm(backend: str, names: tuple[str, ...], value: float) -> None:
    """Equals its loop, for heads with limits that are reached, high, or absent."""
    limit = torch.tensor([0.5, 2.0, 1e3, UNLIMITED], dtype=torch.float64)
    clean, state = draw()
    inputs = with_trouble(clean, names, value)
    expected = limited_loop(limit)(inputs, state)
    with small_chunks():
        for sizes in splits_of(backend):
            actual = in_pieces(
                lambda inputs, state: rescaled_ssd(inputs, state, limit, BACKENDS[backend]),
                inputs,
                state,
                sizes,
            )
            for name, ours, theirs in zip(("y", "state"), actual, expected, strict=True):
                assert_equal_or_both_not_finite(ours, theirs, f"{name} {sizes}")


@cache
def windowed_loop(
    r: int, names: tuple[str, ...], value: float
) -> tuple[ScanInputs, Tensor, Tensor]:
    """Inputs, outputs and final state of the definition of a window, for all backends."""
    inputs, state = draw()
    inputs = with_trouble(inputs, names, value)
    # The decay of a window's first token is of what is outside.
    first = inputs._replace(log_decay=torch.zeros_like(inputs.log_decay))
    y = []
    for t in range(TIME):
        state = torch.zeros_like(state)
        for number, i in enumerate(range(max(0, t - r + 1), t + 1)):
            state = step(inputs if number else first, i, state)
        y.append(read(inputs, t, state))
    return inputs, torch.stack(y, 1), state


@pytest.mark.parametrize(
    ("r", "backend"),
    [
        (r, backend)
        for backend in with_kernels(WINDOWED)
        # In Triton's interpreter one case takes as long as all of another backend.
        for r in ([13] if backend == "triton" else [1, 3, 4, 6, 8, 13, 60])
    ],
)
@every_trouble
def test_sliding_window(r: int, backend: str, names: tuple[str, ...], value: float) -> None:
    """Outputs and states are finite again once the token has left the window."""
    if r > BAD and names == ("log_decay",):
        pytest.skip("before the first token there is nothing that NaN could multiply")
    inputs, expected, final = windowed_loop(r, names, value)
    state = torch.zeros_like(final)
    if r < TIME - BAD:
        assert final.isfinite().all()
    with small_chunks():
        like = ScanInputs(*(tensor[0, :1] for tensor in inputs))
        for sizes in splits_of(backend):
            carry, outputs = init_carry(ScanInputs(*like), torch.zeros_like(state), r), []
            after = state
            for piece in zip(*(tensor.split(sizes, 1) for tensor in inputs), strict=True):
                part, after, carry = windowed_ssd(ScanInputs(*piece), carry, r, BACKENDS[backend])
                outputs.append(part)
            nan = value not in (INF, -INF)
            ours = torch.cat(outputs, 1)
            assert_equal_or_both_not_finite(ours, expected, f"y {sizes}", nan=nan)
            assert_equal_or_both_not_finite(after, final, f"state {sizes}", nan=nan)


@pytest.mark.parametrize("r", [1, 2, 5, 8])
@pytest.mark.parametrize("trouble", ["keep", "add"])
def test_sliding_window_of_a_vector(r: int, trouble: str) -> None:
    """The same holds for the memory of a stepwise cell."""
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
        assert_equal_or_both_not_finite(memory, expected, f"token {t}", dtype=torch.float32)
