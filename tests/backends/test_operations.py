"""Every backend computes what `TORCH` computes, and `TORCH` what the loop over tokens does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops import cpu
from longrnn.ops.backend import BACKENDS, CPU, CPU_GRADIENTS, TORCH, Backend, choose
from longrnn.ops.limit import limited
from longrnn.ops.mamba2_layer.definition import Mamba2State, Weights
from longrnn.ops.scan.definition import ScanInputs, loop
from longrnn.ops.window import no_tokens, state_of, windowed

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
# Rows, tokens, heads, channels per head, groups, numbers of state per channel.
SIZES = [(1, 1, 2, 3, 1, 5), (2, 2, 2, 4, 2, 3), (2, 65, 4, 3, 2, 7), (1, 150, 6, 16, 1, 8)]
SIZES += [(3, 600, 2, 5, 1, 4)]
needs_kernels = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
LOCAL = [
    pytest.param(TORCH, id="torch"),
    pytest.param(CPU, id="cpu", marks=needs_kernels),
    pytest.param(CPU_GRADIENTS, id="cpu with gradients", marks=needs_kernels),
]


def inputs_of(
    sizes: Sequence[int], dtype: torch.dtype, *, starts: bool = False, seed: int = 0
) -> tuple[ScanInputs, Tensor]:
    """Random inputs and a state; some decays are strong, some tokens keep nearly everything."""
    b, t, h, p, g, n = sizes
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_decay = -(draw(b, t, h).abs() ** 6) * 0.01
    if starts:
        log_decay[:, :: max(1, t // 3)] = -torch.inf
    given = draw(b, t, h, p), draw(b, t, h).abs(), log_decay, draw(b, t, g, n), draw(b, t, g, n)
    return ScanInputs(*given).to(dtype), draw(b, h, p, n).to(dtype)


def results(run: Callable[..., Any], *tensors: Tensor, gradients: bool) -> list[Tensor]:
    """Outputs of a function, and the gradients of a random functional of them."""
    tensors = tuple(one.clone().requires_grad_(gradients) for one in tensors)
    outputs = list(run(*tensors))
    if not gradients:
        return outputs
    randomness = torch.Generator().manual_seed(9)
    weights = [
        torch.randn(one.shape, generator=randomness, dtype=torch.float64).to(one) for one in outputs
    ]
    total = sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True))
    assert isinstance(total, Tensor)
    return [*outputs, *torch.autograd.grad(total, tensors, materialize_grads=True)]


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    for number, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        assert ours.shape == exact.shape
        if not exact.numel():
            continue
        error = (ours.double() - exact.double()).abs().max()
        scale = exact.double().abs().max()
        assert error <= tolerance * scale, f"result {number}: {error:.1e} of {scale:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("starts", [False, True], ids=["one document", "document starts"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ops", LOCAL)
def test_scan(ops: Backend, sizes: Sequence[int], starts: bool, dtype: torch.dtype) -> None:
    """Outputs, final state and gradients are those of the loop in float64."""
    inputs, state = inputs_of(sizes, dtype, starts=starts)
    gradients = ops is not CPU

    def run(scan: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: scan(ScanInputs(*tensors[:5]), tensors[5])

    found = results(run(ops.scan), *inputs, state, gradients=gradients)
    wide = (*inputs.to(torch.float64), state.double())
    assert_near(found, results(run(loop), *wide, gradients=gradients), TOLERANCE[dtype])
    from_zero, _ = ops.scan(inputs, final=False)
    assert_near([from_zero], [loop(inputs.to(torch.float64))[0]], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("limit", [0.01, 3.0, 1e9])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ops", LOCAL)
def test_limit(ops: Backend, sizes: Sequence[int], limit: float, dtype: torch.dtype) -> None:
    """Norms are limited as one token after another would be, with gradients."""
    inputs, state = inputs_of(sizes, dtype)
    limits = limit * torch.arange(1, 1 + inputs.x.shape[2]).double()
    limits[-1] = math.inf
    gradients = ops is not CPU

    def by_token(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(inputs.x.shape[1]):
            _, state = loop(inputs.slice(t, t + 1), state)
            norm = state.square().sum((2, 3), keepdim=True).sqrt()
            most = limits.clamp(max=1e30)[:, None, None]
            state = torch.where(norm > most, state * (most / norm), state)
            C = inputs.C[:, t].repeat_interleave(inputs.x.shape[2] // inputs.C.shape[2], 1)
            outputs.append((state @ C[..., None])[..., 0])
        return torch.stack(outputs, 1), state

    def run(limit: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: limit(ScanInputs(*tensors[:5]), tensors[5])

    ours = partial(ops.limit, limit=limits)
    found = results(run(ours), *inputs, state, gradients=gradients)
    wide = (*inputs.to(torch.float64), state.double())
    wanted = results(run(by_token), *wide, gradients=gradients)
    assert_near(found, wanted, TOLERANCE[dtype] * (10 if gradients else 1))


STEADY = [0.0, -1e-7, -1e-5, -1e-3, -0.1, -0.69, -0.7, -3.0, -79.0, -200.0]


@pytest.mark.parametrize(("time", "size"), [(20_000, 20_000), (20_000, 64), (3_000, 1)])
@pytest.mark.parametrize("ops", LOCAL)
def test_a_decay_that_never_changes_does_not_drift(ops: Backend, time: int, size: int) -> None:
    """In one call, in pieces and token by token, float32 has its digits in every head."""
    inputs, state = inputs_of((1, time, len(STEADY), 2, 1, 3), torch.float32)
    decays = torch.tensor(STEADY, dtype=torch.float32).expand(1, time, -1)
    gradients = size == time and ops is not CPU

    def run(x: Tensor, decays: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        given, outputs = inputs._replace(x=x, log_decay=decays).to(state.dtype), []
        for start in range(0, time, size):
            y, state = ops.scan(given.slice(start, start + size), state)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    given = (inputs.x, decays, state)
    found = results(run, *given, gradients=gradients)
    wanted = results(run, *(one.double() for one in given), gradients=gradients)
    for ours, exact, axis in zip(found, wanted, (2, 1, 2, 2, 1), strict=False):
        for pair in zip(ours.unbind(axis), exact.unbind(axis), strict=True):
            assert_near([pair[0]], [pair[1]], 1e-5)


@pytest.mark.parametrize("ops", LOCAL)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_limit_of_values_whose_squares_leave_the_range(size: float, ops: Backend) -> None:
    """States and inputs of any float32 are limited like any others: squares are 0 or infinite."""
    inputs, state = inputs_of((1, 70, 2, 3, 1, 5), torch.float32)
    inputs, state = inputs._replace(x=inputs.x * size), state * 1e5 * size
    limits = torch.tensor([1e-3, 1e3], dtype=torch.float64) * size
    wanted = limited(inputs.to(torch.float64), state.double(), limits)
    assert_near(ops.limit(inputs, state, limits), wanted, 1e-5)


@pytest.mark.parametrize("ops", LOCAL)
def test_strided_inputs_of_several_dtypes(ops: Backend) -> None:
    """x, B and C are slices of one tensor of 16 bits, and gain and decay of another in float32."""
    (x, gain, log_decay, B, C), state = inputs_of((2, 90, 4, 5, 2, 3), torch.float32)
    joined = torch.cat([one.flatten(2) for one in (x, B, C)], -1).bfloat16()
    pair = torch.stack([gain, log_decay], -1)
    parts = joined[:, 1:].split([20, 6, 6], -1)
    shapes = ((4, 5), (2, 3), (2, 3))
    x, B, C = (one.unflatten(-1, shape) for one, shape in zip(parts, shapes, strict=True))
    inputs = ScanInputs(x, pair[:, 1:, :, 0], pair[:, 1:, :, 1], B, C)
    limits = torch.tensor([1.0, 5.0, math.inf, 0.1], dtype=torch.float64)
    wide = (inputs.to(torch.float64), state.double())
    assert_near(ops.scan(inputs, state.mT.contiguous().mT), loop(*wide), 1e-5)
    assert_near(ops.limit(inputs, state, limits), limited(*wide, limits), 1e-5)


def within(inputs: ScanInputs, state: Tensor, ops: Backend) -> tuple[Tensor, Tensor]:
    y, recent = windowed(inputs, no_tokens(inputs, len(state)), 13, ops.scan)
    return y, state_of(recent, inputs)


@pytest.mark.parametrize("name", ["x", "gain", "log_decay", "B", "C"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("ops", LOCAL)
def test_a_token_that_is_not_finite(ops: Backend, value: float, name: str) -> None:
    """It changes no other row and, w tokens later, nothing under a window."""
    inputs, state = inputs_of((3, 150, 4, 3, 2, 5), torch.float64)
    bad = inputs._replace(**{name: getattr(inputs, name).clone()})
    getattr(bad, name)[1, 100] = value if name != "log_decay" else math.nan
    limits = torch.tensor([0.5, 2.0, 1e3, math.inf], dtype=torch.float64)
    runs: list[Callable[..., Any]] = [ops.scan, partial(ops.limit, limit=limits)]
    for run in (*runs, partial(within, ops=ops)):
        found, clean = run(bad, state), run(inputs, state)
        others = [0, 2]
        assert_near([one[others] for one in found], [one[others] for one in clean], 1e-12)
        assert not found[0][1, 100].isfinite().all()
    y, clean = (within(one, state, ops)[0] for one in (bad, inputs))
    assert_near([y[1, 139:]], [clean[1, 139:]], 1e-10)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("log_decay", [-math.inf, -200.0])
@pytest.mark.parametrize("ops", LOCAL)
def test_a_decay_to_zero_removes_what_was_before(
    ops: Backend, log_decay: float, dtype: torch.dtype
) -> None:
    """Inputs and a state of 1e30 have no effect after it."""
    inputs, state = inputs_of((2, 150, 4, 3, 2, 5), dtype)
    inputs.log_decay[:, 30] = log_decay
    inputs.x[:, :30] *= 1e30
    late = inputs.slice(30, 150).to(torch.float64)
    y, final = ops.scan(inputs, 1e30 * state)
    assert_near([y[:, 30:], final], loop(late), TOLERANCE[dtype])


# Heads, channels per head, groups, numbers of state per channel, taps; with a bias of the filter.
CELLS = [
    (4, 6, 2, 5, 4, True),
    (3, 16, 1, 8, 1, False),
    (8, 1, 4, 3, 2, True),
    (2, 9, 2, 33, 4, False),
]


def cell_arguments(
    dtype: torch.dtype,
    *,
    tokens: int,
    narrow: torch.dtype | None = None,
    sizes: tuple[int, int, int, int, int, bool] = CELLS[0],
) -> tuple[Tensor, Weights, Mamba2State]:
    b, (h, p, g, n, k, with_bias) = 2, sizes
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    c = h * p + 2 * g * n
    tensors = draw(c, k), draw(c), draw(h), draw(h), draw(h), draw(h * p)
    weights: list[Any] = [one.to(narrow or dtype) for one in tensors]
    weights[1] = weights[1] if with_bias else None
    state = Mamba2State(draw(b, k - 1, c).to(narrow or dtype), draw(b, h, p, n).to(dtype))
    projected = draw(b, tokens, h * p + c + h).to(narrow or dtype)
    return projected, Weights(*weights, groups=g, norm_eps=1e-5, dt_limit=(0.01, 2.0)), state


def layer(
    projected: Tensor, weights: Weights, state: Mamba2State
) -> tuple[list[Tensor], Callable[[Backend], Callable[..., list[Tensor]]]]:
    """Tensors of a Mamba-2 layer, and its cell as a function of them, given a backend."""
    named = {name: one for name, one in weights._asdict().items() if isinstance(one, Tensor)}

    def run(ops: Backend) -> Callable[..., list[Tensor]]:
        def call(projected: Tensor, conv: Tensor, ssm: Tensor, *tensors: Tensor) -> list[Tensor]:
            changed = weights._replace(**dict(zip(named, tensors, strict=True)))
            y, after = ops.cell(projected, changed, Mamba2State(conv, ssm))
            return [y, *after]

        return call

    return [projected, *state, *named.values()], run


@needs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 131])
@pytest.mark.parametrize("sizes", CELLS, ids=str)
@pytest.mark.parametrize("ops", [CPU, CPU_GRADIENTS, CPU.composed()], ids=["cpu", "grad", "parts"])
def test_cell(ops: Backend, sizes: Any, tokens: int, dtype: torch.dtype) -> None:
    """The layer between its projections, fused and composed of its parts."""
    given, cell = layer(*cell_arguments(dtype, tokens=tokens, sizes=sizes))
    gradients = ops is CPU_GRADIENTS
    found = results(cell(ops), *given, gradients=gradients)
    wanted = results(cell(TORCH), *(one.double() for one in given), gradients=gradients)
    assert_near(found, wanted, TOLERANCE[dtype] * (20 if gradients else 1))


@needs_kernels
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 70])
def test_cell_of_narrow_weights(tokens: int, narrow: torch.dtype) -> None:
    """Inputs and weights of 16 bits are computed in float32 and rounded once."""
    given = cell_arguments(torch.float32, tokens=tokens, narrow=narrow)
    projected, weights, state = given
    values: list[Any] = [one.double() if isinstance(one, Tensor) else one for one in weights]
    wide = Weights(*values)
    exact, after = TORCH.cell(
        projected.double(), wide, Mamba2State(*(one.double() for one in state))
    )
    for ops in (CPU, CPU.composed()):
        y, end = ops.cell(*given)
        assert y.dtype == end.conv.dtype == narrow
        assert end.ssm.dtype == torch.float32
        eps = torch.finfo(narrow).eps
        # Parts round the convolution's output to the dtype of the weights.
        assert_near([y, end.ssm], [exact, after.ssm], eps if ops is CPU else 8 * eps)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("starts", [False, True], ids=["one document", "document starts"])
@pytest.mark.parametrize("w", [1, 2, 7, 40, 64, 1000, 10**9])
def test_window(w: int, starts: bool, dtype: torch.dtype) -> None:
    """A window at any split, from its definition as a sum over the last w tokens."""
    inputs, _ = inputs_of((2, 175, 4, 3, 2, 5), dtype, starts=starts)
    wide = inputs.to(torch.float64)
    terms, wanted, state = [], [], torch.empty(0)
    for t in range(175):
        one = wide.slice(t, t + 1)
        decay = one.log_decay[:, 0].exp()[..., None, None]
        terms = [decay * term for term in terms] + [loop(one)[1]]
        state = torch.stack(terms[-w:]).sum(0)
        C = one.C[:, 0].repeat_interleave(2, 1)
        wanted.append((state @ C[..., None])[..., 0])
    for sizes in ([175], [1] * 175, [20, 1, 1, 30, 23, 100], [64, 64, 47]):
        recent, outputs, start = no_tokens(inputs, 2), [], 0
        for size in sizes:
            part = inputs.slice(start, start + size)
            y, recent = windowed(part, recent, w, choose("auto", inputs).scan)
            outputs.append(y)
            start += size
        found = [torch.cat(outputs, 1), state_of(recent, inputs)]
        assert_near(found, [torch.stack(wanted, 1), state], TOLERANCE[dtype])


def test_choice_of_a_backend() -> None:
    """`auto` takes what covers the call; a named backend is used or refused with the reason."""
    inputs, state = inputs_of((1, 3, 2, 3, 1, 5), torch.float32)
    given = (*inputs, state)
    assert choose("torch", given) is TORCH
    if cpu.missing() is None:
        assert choose("auto", given) is CPU
        tracked = (*inputs, state.clone().requires_grad_())
        assert choose("cpu", tracked) is CPU_GRADIENTS
    elsewhere = [one.to("meta") for one in given]
    assert choose("auto", elsewhere) is TORCH
    for name in set(BACKENDS) - {"torch"}:
        with pytest.raises(UserError, match=name):
            choose(name, elsewhere)


@needs_kernels
def test_second_derivatives_name_the_backend_that_has_them() -> None:
    inputs, state = inputs_of((1, 3, 2, 3, 1, 5), torch.float64)
    state.requires_grad_()
    y, _ = CPU_GRADIENTS.scan(inputs, state)
    with pytest.raises(UserError, match="torch"):
        torch.autograd.grad(y.sum(), state, create_graph=True)
    y, _ = TORCH.scan(inputs, state)
    (grad,) = torch.autograd.grad(y.square().sum(), state, create_graph=True)
    assert torch.autograd.grad(grad.sum(), state)[0].abs().max() > 0
