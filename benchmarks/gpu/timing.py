"""Times of an operation: without gradients, with them, and of its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench

Call = Callable[..., tuple[Tensor, ...]]


@torch.no_grad()
def forward_ms(bench: Bench, call: Call, tensors: Sequence[Tensor]) -> float | None:
    """Milliseconds of a call without gradients."""
    return bench.milliseconds(lambda: call(*tensors))


def kept_ms(bench: Bench, call: Call, tensors: Sequence[Tensor]) -> float | None:
    """Milliseconds of a call that keeps what its backward pass needs."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return bench.milliseconds(lambda: call(*leaves))


def backward_ms(bench: Bench, call: Call, tensors: Sequence[Tensor]) -> float | None:
    """Milliseconds of the backward pass: of both passes without those of the first."""
    forward = kept_ms(bench, call, tensors)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    # Dense gradients: those of a sum would be views of one number, which kernels copy first.
    with torch.no_grad():
        grads = [torch.randn_like(out) for out in call(*tensors)]
    both = bench.milliseconds(lambda: torch.autograd.grad(call(*leaves), leaves, grads))
    return None if forward is None or both is None else both - forward
