"""Compares fused kernels with torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.contracts.builders import TOLERANCE, assert_near, generator


def normal(*shape: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=generator(sum(shape) + seed), dtype=torch.float64)
    return drawn.requires_grad_()


def assert_fused(run: Any, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> None:
    """Outputs and gradients of `run(*tensors, fused=…)` in `dtype` equal those in float64."""

    def outcome(fused: bool, dtype: torch.dtype) -> list[Tensor]:
        given = [None if one is None else one.detach().to(dtype) for one in tensors]
        leaves = [one.requires_grad_() for one in given if one is not None]
        outputs = run(*given, fused=fused)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        real = [one for one in outputs if one.is_floating_point()]
        factors = [torch.linspace(-1, 1, one.numel(), dtype=torch.float64) for one in real]
        pairs = zip(real, factors, strict=True)
        total = torch.stack(
            [(one.double().flatten() * factor).sum() for one, factor in pairs]
        ).sum()
        return [*outputs, *torch.autograd.grad(total, leaves, materialize_grads=True)]

    found, wanted = outcome(True, dtype), outcome(False, torch.float64)
    for number, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        assert ours.dtype == dtype or not ours.is_floating_point()
        assert_near(ours, exact, TOLERANCE[dtype], str(number))
