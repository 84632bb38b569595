"""The Triton kernels of the recurrence against a loop over tokens, over chunks and segments.

Sizes are tiny, because each program takes about 20 ms in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrnn.ops import triton as kernels
from longrnn.ops.ssd import BACKENDS, ScanInputs, chunked, reference, resolve, select, triton
from longrnn.ops.ssd.ends import end_state
from tests.contracts.builders import TOLERANCE, assert_near, generator

pytestmark = pytest.mark.skipif(not kernels.available(), reason=str(kernels.missing()))
DEVICE = "cpu" if kernels.interpreting() else "cuda"
NAN, INF = torch.nan, torch.inf


def draw(
    time: int, dtype: torch.dtype = torch.float64, *, batch: int = 1, heads: int = 2
) -> list[Tensor]:
    """x, gain, log_decay, B, C and a state; one head forgets within tokens, one hardly at all."""
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=randomness, dtype=torch.float64).to(DEVICE, dtype)

    log_decay = -normal(batch, time, heads).square()
    log_decay[..., 0] *= 1e-4
    gain = 0.1 + normal(batch, time, heads).abs()
    wide = normal(batch, time, heads * 3 + 10)  # as the convolution returns x, B and C
    x, B, C = wide.split([heads * 3, 5, 5], dim=-1)
    x = x.unflatten(2, (heads, 3))
    return [x, gain, log_decay, B[:, :, None], C[:, :, None], normal(batch, heads, 3, 5)]


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one chunk of 16 tokens."""
    monkeypatch.setattr(triton, "CHUNK", 16)
    monkeypatch.setattr(triton, "SEGMENT", 16)


def gradients(run, tensors: list[Tensor], rows: Tensor | None = None) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Of a random functional of y (of some rows alone) and the final state."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y, final = run(ScanInputs(*leaves[:-1]), leaves[-1])
    randomness = generator(1)
    weights = [torch.randn(part.shape, generator=randomness).to(part) for part in (y, final)]
    if rows is not None:
        y, final, weights = y[rows], final[rows], [weight[rows] for weight in weights]
    loss = (y * weights[0]).sum() + (final * weights[1]).sum()
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_segments_equal_the_reference(dtype: torch.dtype) -> None:
    """Values, final state and all gradients over three segments, the last of one token."""
    tensors = draw(33, dtype)
    wide = [tensor.double() for tensor in tensors]
    expected = [*reference.ssd(ScanInputs(*wide[:-1]), wide[-1])]
    actual = [*triton.ssd(ScanInputs(*tensors[:-1]), tensors[-1])]
    expected += gradients(reference.ssd, wide)
    actual += gradients(triton.ssd, tensors)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == dtype
        assert_near(ours, theirs, TOLERANCE[dtype])


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    ("field", "value"), [(0, NAN), (0, INF), (1, INF), (2, NAN), (3, -INF), (4, NAN)]
)
def test_what_is_not_finite_stays_where_the_definition_has_it(field: int, value: float) -> None:
    """Later heads, tokens and documents are finite: token 30 restarts."""
    tensors = draw(35)
    tensors[2][:, 30] = -INF
    tensors[field][0, 20].view(-1)[0] = value
    inputs, state = ScanInputs(*tensors[:-1]), tensors[-1]
    for ours, theirs in zip(triton.ssd(inputs, state), reference.ssd(inputs, state), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert_near(ours[theirs.isfinite()], theirs[theirs.isfinite()], 1e-10)


def test_a_row_that_is_not_finite_has_the_gradients_of_the_definition() -> None:
    """Other rows keep theirs, and the row's own are finite where those of the loop are."""
    tensors = draw(5, batch=2, heads=1)
    tensors[0][1, 3] = NAN
    ours, theirs = (gradients(run, tensors) for run in (triton.ssd, chunked.sequential))
    for one, other in zip(ours, theirs, strict=True):
        assert one[0].isfinite().all()
        assert torch.equal(one.isfinite(), other.isfinite())
        assert_near(one[other.isfinite()], other[other.isfinite()], 1e-10)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("time", [9, 35])
def test_the_final_state_alone_is_that_of_the_recurrence(
    time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradients, and no y is computed; one segment and several."""
    from longrnn.ops.triton import recurrence

    monkeypatch.setattr(recurrence, "scan", None)
    tensors, found = draw(time), []
    for fused in (True, False):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        inputs, state = ScanInputs(*leaves[:-1]), leaves[-1]
        final = end_state(inputs, state, triton.ssd) if fused else chunked.ssd(inputs, state)[1]
        total = final.square().sum()
        found.append([final, *torch.autograd.grad(total, leaves, materialize_grads=True)])
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-10)


def test_a_final_state_that_is_not_finite_is_that_of_the_recurrence() -> None:
    """NaN before a document starts does not reach its state."""
    tensors = draw(20)
    tensors[3][:, 4] = NAN
    tensors[2][:, 11] = -INF
    inputs, state = ScanInputs(*tensors[:-1]), tensors[-1]
    assert triton.end_state(inputs, state) is None
    assert_near(end_state(inputs, state, triton.ssd), reference.ssd(inputs, state)[1], 1e-10)


def test_second_derivatives_equal_finite_differences() -> None:
    tensors = [tensor.detach().clone().requires_grad_() for tensor in draw(2, heads=1)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return triton.ssd(ScanInputs(*tensors[:-1]), tensors[-1])

    weights = [torch.ones_like(part) for part in run(*tensors)]
    first = torch.autograd.grad(run(*tensors), tensors, weights, create_graph=True)
    second = torch.autograd.grad([one.square().sum() for one in first], tensors, allow_unused=True)

    wanted = torch.autograd.grad(
        reference.ssd(ScanInputs(*tensors[:-1]), tensors[-1]), tensors, weights, create_graph=True
    )
    wanted = torch.autograd.grad([one.square().sum() for one in wanted], tensors, allow_unused=True)
    for ours, theirs in zip(second, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_near(ours, theirs, 1e-10)


def test_two_numbers_of_the_inputs_dtype_keep_the_digits_of_a_state() -> None:
    """Products of narrow inputs: computed operands as one number have 11 bits, as two 22.

    In float16, because the interpreter computes wrong numbers from bfloat16.
    """
    from longrnn.ops.triton import recurrence
    from longrnn.ops.triton.device import ONE, TWO

    tensors = [tensor.to(torch.float16).float() for tensor in draw(17)]
    inputs, state = ScanInputs(*tensors[:-1]), tensors[-1]
    exact, _ = reference.ssd(ScanInputs(*(t.double() for t in inputs)), state.double())
    given = recurrence.operands(*tensors)
    given = given._replace(x=given.x.half(), B=given.B.half(), C=given.C.half())
    errors = []
    for mode in (ONE, TWO):
        y, *_ = recurrence.forward(given, recurrence.Plan(mode.value, 16, 32, 1))
        errors.append(float((y - exact).abs().max() / exact.abs().max()))
    assert 1e-5 < errors[0] < 2e-3
    assert errors[1] < 2e-6


def test_two_runs_give_the_same_bits() -> None:
    """Values and gradients: no sum depends on the order in which programs run."""
    tensors = draw(17)
    for one, other in zip(*(gradients(BACKENDS["triton"], tensors) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_tensors_of_other_devices_are_computed_by_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend may be chosen before a model moves to a GPU."""
    monkeypatch.setattr(kernels, "interpreting", lambda: False)
    monkeypatch.setattr(kernels, "missing", lambda: None)
    tensors = [tensor.cpu() for tensor in draw(3)]
    inputs, state = ScanInputs(*tensors[:-1]), tensors[-1]
    for ours, theirs in zip(triton.ssd(inputs, state), chunked.ssd(inputs, state), strict=True):
        assert torch.equal(ours, theirs)


def test_auto_takes_no_triton_kernels() -> None:
    """`auto` selects at each call, by the device of the tensors; a name selects once."""
    assert resolve("auto", "cuda") == "chunked"
    assert resolve("auto", "mps") == "chunked"
    assert resolve("triton", "cpu") == "triton"
    inputs, state = ScanInputs(*draw(3)[:-1]), draw(3)[-1]
    expected = BACKENDS[resolve("auto", DEVICE)](inputs, state)
    for ours, theirs in zip(select("auto")(inputs, state), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("small_segments")
def test_gradients_are_those_of_the_reference_when_segments_are_computed_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two segments of 16 tokens at a time, and the fifth alone, with two rows."""
    from longrnn.ops.triton import recurrence_gradient

    tensors = draw(67, batch=2, heads=1)
    bytes_per_segment = tensors[-1].numel() * 8
    monkeypatch.setattr(recurrence_gradient, "BYTES_AT_ONCE", 2 * bytes_per_segment)
    ours, theirs = (gradients(run, tensors) for run in (triton.ssd, chunked.ssd))
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, 1e-10)
