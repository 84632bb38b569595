"""Gradients of the recurrence with a limit on the norm of the state, in the Triton kernels.

Compared with autograd of a float64 loop over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.ops import triton as kernels
from longrnn.ops.ssd import ScanInputs, chunked, rescale, triton
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd
from tests.contracts.builders import (
    assert_near,
    build_mitigated,
    generator,
    random_tokens,
)
from tests.contracts.limits import limited_loop

pytestmark = pytest.mark.skipif(not kernels.available(), reason=str(kernels.missing()))
DEVICE = "cpu" if kernels.interpreting() else "cuda"
NAN, INF = torch.nan, torch.inf
# Most states reach the first limit, few the second; then none does, and none can.
LIMITS = [0.5, 5.0, 1e3, UNLIMITED]
NAMES = (*ScanInputs._fields, "state")


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one chunk of 16 tokens."""
    monkeypatch.setattr(triton, "CHUNK", 16)
    monkeypatch.setattr(triton, "SEGMENT", 16)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the definition in torch."""
    monkeypatch.setattr(rescale, "_in_torch", None)


def draw(
    time: int,
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    head_dim: int = 3,
    d_state: int = 5,
) -> list[Tensor]:
    """x, gain, log_decay, B, C and a state, in float64."""
    randomness = generator(2)

    def normal(*shape: int) -> Tensor:
        shape = (batch, *shape)
        return torch.randn(shape, generator=randomness, dtype=torch.float64).to(DEVICE)

    decays = -0.1 * normal(time, heads).square()
    of_heads = normal(time, heads, head_dim), normal(time, heads), decays
    of_groups = (normal(time, groups, d_state) for _ in range(2))
    return [*of_heads, *of_groups, 2 * normal(heads, head_dim, d_state)]


def limits_of(limits: Sequence[float]) -> Tensor:
    return torch.tensor(limits, dtype=torch.float64, device=DEVICE)


def outcome(
    run: Any, tensors: Sequence[Tensor], limits: Sequence[float], outputs: tuple[int, ...] = (0, 1)
) -> list[Tensor]:
    """y, the final state, and the gradients of a random functional of some of both."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    found = run(ScanInputs(*leaves[:-1]), leaves[-1], limits_of(limits))
    randomness = generator(1)
    weights = [torch.randn(part.shape, generator=randomness).to(part) for part in found]
    loss = torch.stack([(found[i] * weights[i]).nansum() for i in outputs]).sum()
    return [*found, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def in_kernels(inputs: ScanInputs, state: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    return rescaled_ssd(inputs, state, limits, triton.ssd)


def in_torch(inputs: ScanInputs, state: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    return rescaled_ssd(inputs, state, limits, chunked.ssd)


def assert_as_the_loop(
    tensors: Sequence[Tensor],
    limits: Sequence[float],
    tolerance: float = 1e-10,
    **options: Any,
) -> None:
    theirs = outcome(limited_loop, [tensor.double() for tensor in tensors], limits, **options)
    ours = outcome(in_kernels, tensors, limits, **options)
    for name, one, other in zip(("y", "final", *NAMES), ours, theirs, strict=True):
        assert one.dtype == tensors[-1].dtype
        assert_near(one, other, tolerance, name)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 5e-6)], ids=str
)
def test_gradients_are_those_of_the_loop(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads at their limit, below it and without one, two per group; the last chunk is not full.

    A document begins inside a chunk, one head only forgets for some tokens, and the tables of one
    segment are in memory at a time.
    """
    from longrnn.ops.triton import limited_gradient

    monkeypatch.setattr(limited_gradient, "BYTES_AT_ONCE", 1)
    tensors = draw(21, heads=4, groups=2)
    tensors[2][:, 6] = -INF
    tensors[1][:, 9:13, 0] = 0
    tensors[2][:, 9:13, 0] = -0.01
    assert_as_the_loop([tensor.to(dtype) for tensor in tensors], LIMITS, tolerance)


@pytest.mark.usefixtures("kernels_alone")
def test_a_state_of_several_tiles_has_the_gradients_of_the_loop() -> None:
    """A program reads 32 channels at a time; the last tile is not full."""
    assert_as_the_loop(draw(18, heads=1, head_dim=40, d_state=17), [5.0])


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("outputs", [(0,), (1,)])
def test_one_output_alone_has_a_gradient(outputs: tuple[int, ...]) -> None:
    assert_as_the_loop(draw(18, batch=2, heads=1), [1.0], outputs=outputs)


@pytest.mark.usefixtures("kernels_alone")
def test_a_large_state_that_slowly_decays_has_exact_gradients() -> None:
    """A state far above its limit, and then equal ones: the equations of a chunk are all alike."""
    tensors = draw(33)
    tensors[1] *= 1e-3
    tensors[2] *= 1e-6
    tensors[5] *= 1e6
    assert_as_the_loop(tensors, [0.5, 0.5])


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("decay", [1e-6, 1e-2, 3.0])
def test_chunks_of_64_tokens_keep_the_digits_of_float32(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long memory at its limit, a shorter one, and one of a few tokens."""
    monkeypatch.setattr(triton, "CHUNK", 64)
    monkeypatch.setattr(triton, "SEGMENT", 128)
    tensors = draw(200)
    tensors[2] *= decay
    assert_as_the_loop([tensor.float() for tensor in tensors], [0.5, 4.0], 1e-5)


@pytest.mark.usefixtures("kernels_alone")
def test_heads_below_their_limits_have_the_gradients_of_the_plain_recurrence() -> None:
    tensors = draw(20)
    ours = outcome(in_kernels, tensors, [1e3, UNLIMITED])
    plain = outcome(lambda inputs, state, _: triton.ssd(inputs, state), tensors, LIMITS)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


# What a row has that the kernels do not compute: the field, its value, the head and its limit.
@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [(0, 1e13, 0.5), (3, 1e20, UNLIMITED), (5, 1e30, 5.0), (2, 0.1, 0.5), (0, NAN, 5.0)],
)
def test_other_rows_have_the_gradients_of_the_definition(
    field: int, value: float, limit: float
) -> None:
    """Squares beyond float32, a growing state, and NaN, in the second of two rows."""
    tensors = draw(6, batch=2, heads=1)
    tensors[field][1].view(-1)[-1] = value
    theirs, ours = (outcome(run, tensors, [limit]) for run in (in_torch, in_kernels))
    for name, one, other in zip(("y", "final", *NAMES), ours, theirs, strict=True):
        assert one[0].isfinite().all()
        assert torch.equal(one.isfinite(), other.isfinite())
        for row in range(2):
            finite = other[row].isfinite()
            assert_near(one[row][finite], other[row][finite], 1e-9, f"{name} of row {row}")


@pytest.mark.parametrize("limit", [0.0, 1e-9])
def test_a_limit_whose_square_is_small_has_the_gradients_of_the_definition(limit: float) -> None:
    tensors = draw(5, heads=1)
    theirs, ours = (outcome(run, tensors, [limit]) for run in (in_torch, in_kernels))
    for name, one, other in zip(("y", "final", *NAMES), ours, theirs, strict=True):
        assert_near(one, other, 1e-12, name)


def test_only_rows_in_trouble_are_computed_by_the_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    definition = rescale._in_torch

    def recorded(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        rows.append(len(inputs.x))
        return definition(inputs, state, limit)

    monkeypatch.setattr(rescale, "_in_torch", recorded)
    tensors = draw(5, batch=3, heads=1)
    outcome(in_kernels, tensors, [0.5])
    assert rows == []
    tensors[0][1] *= 1e20
    outcome(in_kernels, tensors, [0.5])
    assert rows == [1]


def test_second_derivatives_are_those_of_the_loop() -> None:
    tensors = [tensor.requires_grad_() for tensor in draw(3, heads=1)]
    found = []
    for run in (in_kernels, limited_loop):
        outputs = run(ScanInputs(*tensors[:-1]), tensors[-1], limits_of([1.0]))
        first = torch.autograd.grad([o.square().sum() for o in outputs], tensors, create_graph=True)
        found.append(torch.autograd.grad([one.square().sum() for one in first], tensors))
    for name, ours, theirs in zip(NAMES, *found, strict=True):
        assert_near(ours, theirs, 1e-9, name)


@pytest.mark.usefixtures("kernels_alone")
def test_a_checkpointed_call_has_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    def again(*args: Any) -> Any:
        return checkpoint(in_kernels, *args, use_reentrant=False)

    tensors = draw(18)
    for one, other in zip(
        *(outcome(run, tensors, LIMITS[:2]) for run in (in_kernels, again)), strict=True
    ):
        assert torch.equal(one, other)


def test_a_limit_that_needs_a_gradient_gets_one() -> None:
    """By the definition: the kernels have none."""
    inputs = draw(4)
    found = []
    for ssd in (triton.ssd, chunked.ssd):
        limits = limits_of([0.5, 5.0]).requires_grad_()
        y, _ = rescaled_ssd(ScanInputs(*inputs[:-1]), inputs[-1], limits, ssd)
        found.append(torch.autograd.grad(y.sum(), limits)[0])
    assert_near(found[0], found[1], 1e-10)
    assert float(found[0][0]) != 0


def test_rounded_operands_keep_gradients_and_limits() -> None:
    """Products of narrow inputs: gradients to the digits of training, norms to those of float32.

    In float16, because the interpreter computes wrong numbers from bfloat16.
    """
    from longrnn.ops.triton import limited, limited_gradient, recurrence
    from longrnn.ops.triton.device import ONE

    tensors = [tensor.to(torch.float16).float() for tensor in draw(40)]
    limits = [0.5, 5.0]
    exact = outcome(limited_loop, [tensor.double() for tensor in tensors], limits)
    given = recurrence.operands(*tensors)
    given = given._replace(x=given.x.half(), B=given.B.half(), C=given.C.half())
    how = recurrence.Plan(ONE.value, 16, 32, 2)
    found = limited.forward(given, how, limits_of(limits))
    randomness = generator(1)
    grads = [torch.randn(part.shape, generator=randomness).to(part) for part in found[:2]]
    ours = limited_gradient.backward(given, how, found.scales, found.before, *grads)
    norms = found.final.flatten(2).norm(dim=-1)
    assert bool((norms <= 1.00001 * limits_of(limits)).all())
    for name, one, other in zip(NAMES, ours, exact[2:], strict=True):
        assert_near(one.double(), other, 5e-3, name)


def test_transforms_of_torch_run_the_definition() -> None:
    """Kernels cannot read the tensors of `torch.func`."""
    tensors = draw(4)
    limits = limits_of(LIMITS[:2])

    def total(ssd: Any, state: Tensor) -> Tensor:
        return rescaled_ssd(ScanInputs(*tensors[:-1]), state, limits, ssd)[0].square().sum()

    state = tensors[-1]
    ours, theirs = (
        torch.func.grad(lambda given, ssd=ssd: total(ssd, given))(state)
        for ssd in (triton.ssd, chunked.ssd)
    )
    assert torch.equal(ours, theirs)


def test_a_model_under_state_norm_has_the_gradients_of_the_definition() -> None:
    tokens, found = random_tokens(1, 18).to(DEVICE), []
    for backend in ("triton", "chunked"):
        mixer = {"kind": "mamba2", "d_state": 5, "head_dim": 8, "backend": backend}
        model = build_mitigated([{"kind": "state_norm", "threshold": 0.3}], mixer).to(DEVICE)
        logits, _ = model(tokens)
        loss = logits.logsumexp(-1).sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-9)
