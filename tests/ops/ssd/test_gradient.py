"""The hand-written backward pass of a segment."""

from __future__ import annotations

import pytest
import torch
from longrnn.ops.ssd import ScanInputs, chunked
from torch import Tensor

from tests.contracts.builders import generator


def draw() -> list[Tensor]:
    """x, gain, log_decay, B, C and a state, of 6 tokens."""
    shapes = [(2, 6, 4, 2), (2, 6, 4), (2, 6, 4), (2, 6, 2, 3), (2, 6, 2, 3), (2, 4, 2, 3)]
    randomness = generator(0)
    tensors = [torch.randn(s, generator=randomness, dtype=torch.float64) for s in shapes]
    tensors[2] = -tensors[2].abs()
    return [tensor.requires_grad_() for tensor in tensors]


def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return chunked.ssd(ScanInputs(*tensors[:5]), tensors[5])


def test_gradients_equal_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """First and second derivatives of outputs and final state, over two chunks."""
    monkeypatch.setattr(chunked, "CHUNK", 3)
    assert torch.autograd.gradcheck(run, draw())
    assert torch.autograd.gradgradcheck(run, draw())


@pytest.mark.parametrize("which", [0, 1])
def test_one_output_alone_has_a_gradient(which: int) -> None:
    """The other output may be unused, and equals a gradient of zero."""
    tensors = draw()
    found = torch.autograd.grad(
        run(*tensors)[which].sum(), tensors, allow_unused=True, materialize_grads=True
    )
    y, final = run(*tensors)
    both = (y, 0 * final) if which == 0 else (0 * y, final)
    expected = torch.autograd.grad(both[0].sum() + both[1].sum(), tensors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
