"""Every implementation computes what the loop over tokens does, and says what it refuses."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from longrnn.cells import MIXERS, Mamba2
from longrnn.errors import UserError
from longrnn.ops import cpu
from longrnn.ops.conv import CONV
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.cpu.signatures import MAX_TAPS
from longrnn.ops.operation import Implementation, Operation
from longrnn.ops.scan import DELTA, SCAN
from longrnn.ops.scan.definition import loop
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.limit import limited
from longrnn.ops.scan.window import initial_recent, state_of

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
needs_kernels = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
assert SCAN.limited is not None
assert DELTA.limited is not None
LIMITED: Operation = SCAN.limited


def local(operation: Operation) -> list[Any]:
    """Parameters of a test: the implementations of an operation that run on a CPU."""
    return [
        pytest.param(one, id=one.name, marks=[needs_kernels] if one.name == "cpu" else [])
        for one in operation.implementations
        if one.name in ("torch", "cpu")
    ]


every_scan = pytest.mark.parametrize("implementation", local(SCAN))
every_backend = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("cpu", marks=needs_kernels)]
)


def inputs_of(sizes: Sequence[int], dtype: torch.dtype) -> tuple[ScanInputs, Tensor]:
    """Random inputs and a state; some decays are strong, some tokens keep nearly everything.

    `sizes` are rows, tokens, heads, channels per head, groups, numbers of state per channel.
    """
    b, t, h, p, g, n = sizes
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_decay = -(draw(b, t, h).abs() ** 6) * 0.01
    given = draw(b, t, h, p), draw(b, t, h).abs(), log_decay, draw(b, t, g, n), draw(b, t, g, n)
    return inputs_from(*given).to(dtype), draw(b, h, p, n).to(dtype)


def inputs_from(x: Tensor, gain: Tensor, log_decay: Tensor, B: Tensor, C: Tensor) -> ScanInputs:
    """Inputs of a recurrence from its log decays."""
    return ScanInputs(x, gain, Decay(log_decay), B, C)


def tensors_of(inputs: ScanInputs) -> list[Tensor]:
    """The arguments of `inputs_from`."""
    return [inputs.x, inputs.gain, inputs.decay.log(), inputs.B, inputs.C]


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


def of_scan(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrence as a function of its tensors."""
    return lambda *given: scan(inputs_from(*given[:5]), *given[5:])


def assert_near(
    found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float, how: object = ""
) -> None:
    for number, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        assert ours.shape == exact.shape
        if not exact.numel():
            continue
        error = (ours.double() - exact.double()).abs().max()
        scale = exact.double().abs().max()
        assert error <= tolerance * scale, f"{how} result {number}: {error:.1e} of {scale:.1e}"


STEADY = [0.0, -1e-7, -1e-5, -1e-3, -0.1, -0.69, -0.7, -3.0, -79.0, -200.0]


@pytest.mark.parametrize(("time", "size"), [(20_000, 20_000), (20_000, 64), (3_000, 1)])
@every_scan
def test_a_decay_that_never_changes_does_not_drift(
    implementation: Implementation, time: int, size: int
) -> None:
    """In one call, in pieces and token by token, float32 has its digits in every head."""
    inputs, state = inputs_of((1, time, len(STEADY), 2, 1, 3), torch.float32)
    decays = torch.tensor(STEADY, dtype=torch.float32).expand(1, time, -1)
    gradients = size == time

    def run(x: Tensor, decays: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        given, outputs = inputs._replace(x=x, decay=Decay(decays)).to(state.dtype), []
        for start in range(0, time, size):
            y, state = implementation.run(given.slice(start, start + size), state)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    given = (inputs.x, decays, state)
    found = results(run, *given, gradients=gradients)
    wanted = results(run, *(one.double() for one in given), gradients=gradients)
    for ours, exact, axis in zip(found, wanted, (2, 1, 2, 2, 1), strict=False):
        for pair in zip(ours.unbind(axis), exact.unbind(axis), strict=True):
            assert_near([pair[0]], [pair[1]], 1e-5)


@pytest.mark.parametrize("implementation", local(LIMITED))
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_limit_of_values_whose_squares_leave_the_range(
    size: float, implementation: Implementation
) -> None:
    """States and inputs of any float32 are limited like any others: squares are 0 or infinite."""
    inputs, state = inputs_of((1, 70, 2, 3, 1, 5), torch.float32)
    inputs, state = inputs._replace(x=inputs.x * size), state * 1e5 * size
    limits = torch.tensor([1e-3, 1e3], dtype=torch.float64) * size
    wanted = limited(inputs.to(torch.float64), state.double(), limits)
    assert_near(implementation.run(inputs, state, limits), wanted, 1e-5)


@every_backend
def test_strided_inputs_of_several_dtypes(backend: str) -> None:
    """x, B and C are slices of one tensor of 16 bits, and gain and decay of another in float32."""
    inputs, state = inputs_of((2, 90, 4, 5, 2, 3), torch.float32)
    x, gain, log_decay, B, C = tensors_of(inputs)
    joined = torch.cat([one.flatten(2) for one in (x, B, C)], -1).bfloat16()
    pair = torch.stack([gain, log_decay], -1)
    parts = joined[:, 1:].split([20, 6, 6], -1)
    shapes = ((4, 5), (2, 3), (2, 3))
    x, B, C = (one.unflatten(-1, shape) for one, shape in zip(parts, shapes, strict=True))
    inputs = inputs_from(x, pair[:, 1:, :, 0], pair[:, 1:, :, 1], B, C)
    limits = torch.tensor([1.0, 5.0, math.inf, 0.1], dtype=torch.float64)
    wide = (inputs.to(torch.float64), state.double())
    assert_near(SCAN(backend, inputs, state.mT.contiguous().mT), loop(*wide), 1e-5)
    assert_near(LIMITED(backend, inputs, state, limits), limited(*wide, limits), 1e-5)


def within(inputs: ScanInputs, state: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    assert SCAN.windowed is not None
    y, recent = SCAN.windowed(backend, inputs, initial_recent(inputs, len(state)), 13)
    return y, state_of(recent, inputs)


@pytest.mark.parametrize("name", ["x", "gain", "log_decay", "B", "C"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@every_backend
def test_a_token_that_is_not_finite(backend: str, value: float, name: str) -> None:
    """It changes no other row and, w tokens later, nothing under a window."""
    inputs, state = inputs_of((3, 150, 4, 3, 2, 5), torch.float64)
    bad = inputs.each(Tensor.clone)
    changed = bad.decay.step if name == "log_decay" else getattr(bad, name)
    changed[1, 100] = value if name != "log_decay" else math.nan
    limits = torch.tensor([0.5, 2.0, 1e3, math.inf], dtype=torch.float64)
    runs: list[Callable[..., Any]] = [SCAN.bound(backend), partial(within, backend=backend)]
    runs.append(lambda given, state: LIMITED(backend, given, state, limits))
    for run in runs:
        found, clean = run(bad, state), run(inputs, state)
        others = [0, 2]
        assert_near([one[others] for one in found], [one[others] for one in clean], 1e-12)
        assert not found[0][1, 100].isfinite().all()
    y, clean = (within(one, state, backend)[0] for one in (bad, inputs))
    assert_near([y[1, 139:]], [clean[1, 139:]], 1e-10)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("log_decay", [-math.inf, -200.0])
@every_scan
def test_a_decay_to_zero_removes_what_was_before(
    implementation: Implementation, log_decay: float, dtype: torch.dtype
) -> None:
    """Inputs and a state of 1e30 have no effect after it."""
    inputs, state = inputs_of((2, 150, 4, 3, 2, 5), dtype)
    inputs.decay.step[:, 30] = log_decay
    inputs.x[:, :30] *= 1e30
    late = inputs.slice(30, 150).to(torch.float64)
    y, final = implementation.run(inputs, 1e30 * state)
    assert_near([y[:, 30:], final], loop(late), TOLERANCE[dtype])


def mamba2(dtype: torch.dtype, backend: str = "torch") -> Mamba2:
    """A layer with random weights of ordinary size."""
    options: dict[str, Any] = {"d_state": 5, "head_dim": 6, "n_groups": 2, "dt_limit": [0.01, 2.0]}
    cell = Mamba2(24, 24, expand=1, backend=backend, **options).double()
    randomness = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in cell.parameters():
            weight.copy_(torch.randn(weight.shape, generator=randomness, dtype=torch.float64))
        cell.in_proj.weight.mul_(cell.d_input**-0.5)
    return cell.to(dtype)


def layer_results(
    cell: Mamba2, tokens: int, *, gradients: bool, size: float = 1.0, of_state: float = 1.0
) -> list[Tensor]:
    """Outputs and state, and the gradients of the inputs, the state and all weights."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dtype, like = cell.in_proj.weight.dtype, cell.state_like()
    x = (size * draw(2, tokens, cell.d_input)).to(dtype)
    conv = draw(2, *like.conv.shape).to(dtype)
    ssm = (of_state * draw(2, *like.ssm.shape)).to(like.ssm.dtype)
    weights = {name: weight.detach() for name, weight in cell.named_parameters()}

    def run(x: Tensor, conv: Tensor, ssm: Tensor, *values: Tensor) -> list[Tensor]:
        given = dict(zip(weights, values, strict=True))
        y, after = functional_call(cell, given, (x, ConvState(conv, ssm)))
        return [y, *after]

    return results(run, x, conv, ssm, *weights.values(), gradients=gradients)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 70])
@every_backend
def test_a_layer_of_narrow_weights(backend: str, tokens: int, narrow: torch.dtype) -> None:
    """What is left is mostly the rounding of the projection: 4.6 units in the last place."""
    found = layer_results(mamba2(narrow, backend), tokens, gradients=False)
    exact = layer_results(mamba2(narrow).double(), tokens, gradients=False)
    assert [one.dtype for one in found] == [narrow, narrow, torch.float32]
    assert_near(found, exact, 8 * torch.finfo(narrow).eps)


@every_backend
def test_gradients_in_float16_are_finite_where_the_loss_is(backend: str) -> None:
    """Before the norm, the output of the recurrence is above the largest float16."""
    large = partial(layer_results, tokens=20, gradients=True, size=30.0, of_state=1e4)
    found = large(mamba2(torch.float16, backend))
    exact = large(mamba2(torch.float16).double())
    pairs = [pair for pair in zip(found, exact, strict=True) if pair[1].abs().max() < 6e4]
    assert len(pairs) > 8
    assert_near(*zip(*pairs, strict=True), 2e-2)  # type: ignore[misc]


def test_a_named_backend_is_used_or_refused() -> None:
    inputs, state = inputs_of((1, 3, 2, 3, 1, 5), torch.float32)
    kernels = "torch" if cpu.missing() else "cpu"
    elsewhere = inputs.each(lambda one: one.to("meta")), state.to("meta")
    for operation in (SCAN, DELTA):
        for backend, expected in (("torch", "torch"), ("auto", kernels), ("another", "torch")):
            chosen = operation.choose(backend, inputs, state)
            assert chosen.name == expected
        assert operation.choose("auto", *elsewhere).name == "torch"
        for backend in ("cpu", "fla"):
            with pytest.raises(UserError, match=backend):
                operation(backend, *elsewhere)
    with pytest.raises(UserError, match="mamba_ssm"):
        SCAN("mamba_ssm", *elsewhere)


@needs_kernels
def test_no_kernel_computes_beyond_its_limits() -> None:
    """`auto` takes another implementation, and a named one is refused with the reason."""
    x, weight, state = (
        torch.zeros(1, 3, 4),
        torch.zeros(4, MAX_TAPS + 1),
        torch.zeros(1, MAX_TAPS, 4),
    )
    assert CONV.choose("auto", x, weight, None, state).name == "torch"
    with pytest.raises(UserError, match="taps"):
        CONV.choose("cpu", x, weight, None, state)


@needs_kernels
@pytest.mark.parametrize("taps", [MAX_TAPS, MAX_TAPS + 1])
def test_the_widest_filters_are_computed(taps: int) -> None:
    """Outputs, states and gradients of a model; with one tap more, other code than the kernels."""
    options: dict[str, Any] = {"d_state": 5, "head_dim": 4, "d_conv": taps}
    torch.manual_seed(0)
    exact = Mamba2(8, 8, backend="torch", **options).double()
    cell = Mamba2(8, 8, **options)
    cell.load_state_dict(exact.state_dict())
    x = torch.randn(2, 40, 8, dtype=torch.float64)

    def run(cell: Mamba2) -> Callable[..., Any]:
        return lambda x: cell(x, cell.init_state(2))[0][None]

    expected = results(run(exact), x, gradients=True)
    assert_near(results(run(cell), x.float(), gradients=True), expected, 1e-4)


@pytest.mark.parametrize("time", [1, 5])
@pytest.mark.parametrize("kind", MIXERS)
def test_a_batch_without_rows_has_outputs_without_rows(kind: str, time: int) -> None:
    cell = MIXERS.build({"kind": kind}, 64, 64)
    x = torch.zeros(0, time, 64, requires_grad=True)
    y, _ = cell(x, cell.init_state(0))
    y.sum().backward()
    with torch.no_grad():
        assert cell(x, cell.init_state(0))[0].shape == y.shape == (0, time, 64)


@needs_kernels
def test_second_derivatives_name_the_backend_that_has_them() -> None:
    inputs, state = inputs_of((1, 3, 2, 3, 1, 5), torch.float64)
    state.requires_grad_()
    y, _ = SCAN("cpu", inputs, state)
    with pytest.raises(UserError, match="torch"):
        torch.autograd.grad(y.sum(), state, create_graph=True)
    y, _ = SCAN("torch", inputs, state)
    (grad,) = torch.autograd.grad(y.square().sum(), state, create_graph=True)
    assert torch.autograd.grad(grad.sum(), state)[0].abs().max() > 0
