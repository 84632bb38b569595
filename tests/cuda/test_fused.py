"""Each fused kernel against torch's operators in float64 on a CPU: in float32, and in bfloat16.

On a CPU the kernels run in Triton's interpreter, which computes bfloat16 inputs in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.ops import triton as kernels
from longrnn.ops.conv import causal_conv
from longrnn.ops.cross_entropy import weighted_cross_entropy
from longrnn.ops.norm import gated_rms_norm, rms_norm
from longrnn.ops.ssd import BACKENDS, ScanInputs, triton
from longrnn.ops.ssd.rescale import rescaled_ssd
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from longrnn.ops.steps import step_sizes
from tests.contracts.builders import assert_near, generator

pytestmark = pytest.mark.skipif(not kernels.available(), reason=str(kernels.missing()))
NARROW = torch.bfloat16
# In bfloat16: one rounding of the result, and one of each gradient that passes through it.
TOLERANCE = {torch.float32: 1e-5, NARROW: 4 * 2**-8}
TIME, TARGETS = 37, torch.arange(24).view(2, 12)


def convolution(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, *, fused: bool) -> Any:
    return causal_conv(x, weight, bias, state, activation=True, fused=fused)


def steps(raw: Tensor, bias: Tensor, *, fused: bool) -> Any:
    wide = torch.promote_types(raw.dtype, torch.float32)
    return step_sizes(raw, bias, (1e-3, 2.0), wide, fused=fused)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, D: Tensor, *, fused: bool) -> Any:
    skip = (gate.unflatten(-1, (3, 4)), D)
    return gated_rms_norm(x, gate, weight, 1e-5, 2, skip=skip, fused=fused)


def norm(x: Tensor, weight: Tensor, *, fused: bool) -> Any:
    return rms_norm(x, weight, 1e-5, fused=fused)


def loss(hidden: Tensor, head: Tensor, *, fused: bool) -> Any:
    targets = TARGETS.to(hidden.device)
    weights = torch.linspace(0, 1, 24, device=hidden.device).view(2, 12)
    return weighted_cross_entropy(hidden, head, targets, weights, max_logits=300, fused=fused).loss


# The function, and the shapes of its tensors.
FUSED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "convolution": (convolution, [(2, TIME, 9), (2, 3, 9), (9, 4), (9,)]),
    "steps": (steps, [(2, TIME, 5), (5,)]),
    "gated_norm": (gated_norm, [(2, 5, 12), (2, 5, 12), (12,), (3,)]),
    "norm": (norm, [(2, 5, 12), (12,)]),
    "loss": (loss, [(2, 12, 16), (24, 16)]),
}


def draw(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Numbers that `dtype` holds exactly, in float64."""
    randomness = generator(0)
    drawn = [torch.randn(shape, generator=randomness, dtype=torch.float64) for shape in shapes]
    return [one.to(dtype).double() for one in drawn]


def outcome(run: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of all tensors."""
    given = [tensor.requires_grad_() for tensor in tensors]
    found = run(*given)
    outputs = list(found) if isinstance(found, tuple) else [found]
    total = torch.stack([one.double().square().mean() for one in outputs]).sum()
    return [*outputs, *torch.autograd.grad(total, given)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_operations_around_the_recurrence(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Values and all gradients."""
    run, shapes = FUSED[name]
    drawn = draw(shapes, dtype)
    wanted = outcome(lambda *given: run(*given, fused=False), [one.clone() for one in drawn])
    found = outcome(
        lambda *given: run(*given, fused=True), [one.to(device, dtype) for one in drawn]
    )
    for number, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        assert_near(ours.detach().cpu(), exact, TOLERANCE[dtype], str(number))


def plain(inputs: ScanInputs, state: Tensor, ssd: Any) -> Any:
    return ssd(inputs, state)


def limited(inputs: ScanInputs, state: Tensor, ssd: Any) -> Any:
    limit = torch.full((3,), 2.0, dtype=torch.float64, device=state.device)
    return rescaled_ssd(inputs, state, limit, ssd)


def windowed(inputs: ScanInputs, state: Tensor, ssd: Any) -> Any:
    carry = init_carry(ScanInputs(*(tensor[0, :1] for tensor in inputs)), state, 9)
    return windowed_ssd(inputs, carry, 9, ssd)[0]


@pytest.mark.parametrize("run", [plain, limited, windowed])
def test_the_recurrence_its_limit_and_its_window(
    run: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a given state; the plain recurrence with the gradients of all inputs."""
    monkeypatch.setattr(triton, "CHUNK", 16)
    monkeypatch.setattr(triton, "SEGMENT", 32)
    x, gain, decay, B, C, state = draw(
        [
            (1, TIME, 3, 5),
            (1, TIME, 3),
            (1, TIME, 3),
            (1, TIME, 1, 6),
            (1, TIME, 1, 6),
            (1, 3, 5, 6),
        ],
        torch.float32,
    )
    drawn = [x, gain.abs() * 0.3, -0.1 * decay.square(), B, C, state]
    drawn = [one.float().double() for one in drawn]

    def computed(tensors: list[Tensor], ssd: Any) -> list[Tensor]:
        def call(*given: Tensor) -> Any:
            return run(ScanInputs(*given[:5]), given[5], ssd)

        if run is plain:
            return outcome(call, tensors)
        with torch.no_grad():
            found = call(*tensors)
        return list(found) if isinstance(found, tuple) else [found]

    wanted = computed([one.clone() for one in drawn], BACKENDS["reference"])
    found = computed([one.to(device, torch.float32) for one in drawn], triton.ssd)
    for number, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        assert_near(ours.detach().cpu(), exact, 2e-5, str(number))
