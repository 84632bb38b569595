"""The Triton kernels of a limit on the norm of the state, against a float64 loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrnn.ops import triton as kernels
from longrnn.ops.ssd import ScanInputs, rescale, triton
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd
from tests.contracts.builders import assert_near, generator
from tests.contracts.limits import limited_loop

pytestmark = pytest.mark.skipif(not kernels.available(), reason=str(kernels.missing()))
DEVICE = "cpu" if kernels.interpreting() else "cuda"
# A limit that most states reach, one that some reach, and none.
LIMITS = torch.tensor([0.5, 5.0, UNLIMITED], dtype=torch.float64)
TIME, EVENT = 40, 20


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two chunks of 16 tokens."""
    monkeypatch.setattr(triton, "CHUNK", 16)
    monkeypatch.setattr(triton, "SEGMENT", 32)


def draw(dtype: torch.dtype) -> tuple[ScanInputs, Tensor]:
    randomness = generator(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=randomness, dtype=torch.float64)

    fields = normal(TIME, 3, 3), normal(TIME, 3).abs(), -0.1 * normal(TIME, 3).square()
    inputs = (*fields, normal(TIME, 1, 5), normal(TIME, 1, 5))
    state = normal(3, 3, 5)
    return ScanInputs(*(one.to(DEVICE, dtype) for one in inputs)), state.to(DEVICE, dtype)


def loop(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return limited_loop(inputs, state, LIMITS.to(DEVICE))


# The size of x at one token: as the others, beyond what squares of float32 hold, not finite.
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float64, 1.0), (torch.float32, 1e25), (torch.float64, torch.nan)]
)
def test_equals_the_loop(dtype: torch.dtype, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head keeps its limit, whichever kernel computes it."""
    inputs, state = draw(dtype)
    x = inputs.x.clone()
    x[:, EVENT, 1] *= size
    inputs = inputs._replace(x=x)
    monkeypatch.setattr(rescale, "_in_torch", None)
    found = rescaled_ssd(inputs, state, LIMITS.to(DEVICE), triton.ssd)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-6
    for axis, ours, theirs in zip((2, 1), found, loop(inputs, state), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        for head in range(3):
            one, other = ours.select(axis, head), theirs.select(axis, head)
            finite = other.isfinite()
            assert_near(one[finite], other[finite], tolerance, f"head {head}")
