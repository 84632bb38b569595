"""Compiles the kernels beside the recurrence: see `tests.ops.triton.compiled`.

`python -m tests.ops.triton.compiled_around 90 convolution token`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.triton import compiled

BF16, FP32 = torch.bfloat16, torch.float32
# Mamba-2 2.7B: tokens, heads, channels per head, numbers of state, channels of the convolution.
T, H, P, N = 65_536, 80, 64, 128
C = H * P + 2 * N
MODULES = "longrnn.ops.triton."


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _projected(time: int, dtype: torch.dtype) -> Tensor:
    return _empty(1, time, H * P + C + H, dtype=dtype)


def _convolution(dtype: torch.dtype, *, back: bool) -> Callable[[Any], object]:
    def run(host: Any) -> None:
        x = _projected(T, dtype)[..., H * P : H * P + C]
        weights = _empty(C, 4, dtype=dtype), _empty(C, dtype=dtype)
        given = (x, _empty(1, 3, C, dtype=dtype), *weights, True)
        if back:
            host.backward(*given, _empty(1, T, C, dtype=dtype), wants_weights=True)
        else:
            host.forward(*given)

    return run


def _gated_norm(dtype: torch.dtype, *, back: bool) -> Callable[[Any], object]:
    def run(host: Any) -> None:
        gate, weight = _projected(T, dtype)[..., : H * P], _empty(H * P, dtype=dtype)
        sum_of = {"skip": _empty(1, T, C, dtype=dtype)[..., : H * P], "D": _empty(H, dtype=FP32)}
        if back:
            x, scale = _empty(1, T, H * P, dtype=dtype), _empty(T, 1, dtype=FP32)
            host.backward(x, weight, scale, x, gate=gate, **sum_of, is_total=True, dtype=FP32)
        else:
            x = _empty(1, T, H * P, dtype=FP32)
            host.forward(x, weight, 1e-5, gate=gate, **sum_of, dtype=dtype, keep=True)

    return run


def _norm(dtype: torch.dtype, *, back: bool) -> Callable[[Any], object]:
    def run(host: Any) -> None:
        x, weight = _empty(1, T, H * P // 2, dtype=dtype), _empty(H * P // 2, dtype=dtype)
        if back:
            scale = _empty(T, 1, dtype=FP32)
            host.backward(x, weight, scale, x, dtype=dtype)
        else:
            host.forward(x, weight, 1e-5, dtype=dtype)

    return run


def _token(dtype: torch.dtype) -> Callable[[Any], object]:
    def run(host: Any) -> None:
        rates = (_empty(H, dtype=FP32) for _ in range(3))
        weights = host.Weights(_empty(C, 4, dtype=dtype), _empty(C, dtype=dtype), *rates)
        states = _empty(1, 3, C, dtype=dtype), _empty(1, H, P, N, dtype=FP32)
        limits = (0.0, float("inf"))
        host.step(_projected(1, dtype), weights, *states, groups=1, dt_limit=limits)

    return run


def _loss(dtype: torch.dtype | None) -> Callable[[Any], object]:
    def run(host: Any) -> None:
        logits = _empty(2048, 50_288, dtype=FP32)
        host.losses(logits, _empty(2048, dtype=torch.long), dtype)

    return run


CASES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "convolution": (MODULES + "convolution", _convolution(BF16, back=False)),
    "convolution-backward": (MODULES + "convolution", _convolution(BF16, back=True)),
    "convolution-backward-float32": (MODULES + "convolution", _convolution(FP32, back=True)),
    "gated-norm": (MODULES + "norm", _gated_norm(BF16, back=False)),
    "gated-norm-backward": (MODULES + "norm", _gated_norm(BF16, back=True)),
    "norm": (MODULES + "norm", _norm(BF16, back=False)),
    "norm-backward": (MODULES + "norm", _norm(BF16, back=True)),
    "token": (MODULES + "token", _token(BF16)),
    "token-float32": (MODULES + "token", _token(FP32)),
    "loss": (MODULES + "loss", _loss(None)),
    "loss-gradient": (MODULES + "loss", _loss(BF16)),
    "loss-gradient-float32": (MODULES + "loss", _loss(FP32)),
}

if __name__ == "__main__":
    compiled.CASES.update(CASES)
    compiled.main(*sys.argv[1:])
