"""Compiles the kernels beside the recurrence: see `tests.ops.triton.compiled`.

`python -m tests.ops.triton.compiled_around 90 convolution token`.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from longrnn.ops.triton import convolution, loss, norm, residual, steps, token
from tests.ops.triton import compiled
from tests.ops.triton.compiled import Case, launches_of

BF16, FP32 = torch.bfloat16, torch.float32
# Mamba-2 2.7B: tokens, heads, channels per head, numbers of state, channels of the convolution.
T, H, P, N = 65_536, 80, 64, 128
C = H * P + 2 * N


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _projected(time: int, dtype: torch.dtype) -> Tensor:
    return _empty(1, time, H * P + C + H, dtype=dtype)


def _convolution(dtype: torch.dtype, *, back: bool) -> Case:
    def run() -> None:
        x = _projected(T, dtype)[..., H * P : H * P + C]
        weights = _empty(C, 4, dtype=dtype), _empty(C, dtype=dtype)
        given = (x, _empty(1, 3, C, dtype=dtype), *weights, True)
        if back:
            convolution.backward(*given, _empty(1, T, C, dtype=dtype), wants_weights=True)
        else:
            convolution.forward(*given)

    return lambda: launches_of(run, convolution)


def _gated_norm(dtype: torch.dtype, *, back: bool) -> Case:
    def run() -> None:
        gate, weight = _projected(T, dtype)[..., : H * P], _empty(H * P, dtype=dtype)
        skip, D = _empty(1, T, C, dtype=dtype)[..., : H * P], _empty(H, dtype=FP32)
        if back:
            x, scale = _empty(1, T, H * P, dtype=dtype), _empty(T, 1, dtype=FP32)
            norm.backward(x, weight, scale, x, gate=gate, skip=skip, D=D, is_total=True, dtype=FP32)
        else:
            x = _empty(1, T, H * P, dtype=FP32)
            norm.forward(x, weight, 1e-5, gate=gate, skip=skip, D=D, dtype=dtype, keep=True)

    return lambda: launches_of(run, norm)


def _norm(dtype: torch.dtype, *, back: bool) -> Case:
    def run() -> None:
        x, weight = _empty(1, T, H * P // 2, dtype=dtype), _empty(H * P // 2, dtype=dtype)
        if back:
            scale = _empty(T, 1, dtype=FP32)
            norm.backward(x, weight, scale, x, dtype=dtype)
        else:
            norm.forward(x, weight, 1e-5, dtype=dtype)

    return lambda: launches_of(run, norm)


def _residual(dtype: torch.dtype, *, back: bool) -> Case:
    """The stream in `dtype`, and the branch and the norm in bfloat16."""

    def run() -> None:
        x, branch = (_empty(1, T, H * P // 2, dtype=one) for one in (dtype, BF16))
        weight = _empty(H * P // 2)
        if back:
            scale = _empty(T, dtype=FP32)
            residual.backward(x, weight, scale, x, branch, (dtype, BF16))
        else:
            residual.forward(x, branch, weight, 1e-5, BF16)

    return lambda: launches_of(run, residual)


def _steps(dtype: torch.dtype, *, back: bool) -> Case:
    def run() -> None:
        raw, bias, limit = _projected(T, dtype)[..., -H:], _empty(H, dtype=FP32), (0.0, 1.0)
        if back:
            steps.backward(raw, bias, limit, _empty(1, T, H, dtype=FP32))
        else:
            steps.forward(raw, bias, limit, FP32)

    return lambda: launches_of(run, steps)


def _token(dtype: torch.dtype) -> Case:
    def run() -> None:
        rates = (_empty(H, dtype=FP32) for _ in range(3))
        weights = token.Weights(_empty(C, 4, dtype=dtype), _empty(C, dtype=dtype), *rates)
        states = _empty(1, 3, C, dtype=dtype), _empty(1, H, P, N, dtype=FP32)
        limits = (0.0, float("inf"))
        token.step(_projected(1, dtype), weights, *states, groups=1, dt_limit=limits)

    return lambda: launches_of(run, token)


def _loss(dtype: torch.dtype | None) -> Case:
    def run() -> None:
        logits = _empty(2048, 50_288, dtype=FP32)
        loss.losses(logits, _empty(2048, dtype=torch.long), dtype)

    return lambda: launches_of(run, loss)


CASES: dict[str, Case] = {
    "convolution": _convolution(BF16, back=False),
    "convolution-backward": _convolution(BF16, back=True),
    "convolution-backward-float32": _convolution(FP32, back=True),
    "gated-norm": _gated_norm(BF16, back=False),
    "gated-norm-backward": _gated_norm(BF16, back=True),
    "norm": _norm(BF16, back=False),
    "norm-backward": _norm(BF16, back=True),
    "residual": _residual(BF16, back=False),
    "residual-backward": _residual(BF16, back=True),
    "residual-float32": _residual(FP32, back=False),
    "residual-float32-backward": _residual(FP32, back=True),
    "steps": _steps(BF16, back=False),
    "steps-backward": _steps(BF16, back=True),
    "token": _token(BF16),
    "token-float32": _token(FP32),
    "loss": _loss(None),
    "loss-gradient": _loss(BF16),
    "loss-gradient-float32": _loss(FP32),
}

if __name__ == "__main__":
    compiled.CASES.update(CASES)
    compiled.main(*sys.argv[1:])
