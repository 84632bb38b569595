# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The step sizes of Mamba-2, forward and backward, in one kernel each.

A program computes some tokens of all heads. The gradient of the bias is added up by each program,
and then over programs by torch, so that two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import on_device, readable
from longrnn.ops.triton.token import softplus

TOKENS = 32


@triton.jit
def _place(heads, T, row_stride, token_stride, BT: tl.constexpr, BH: tl.constexpr):
    """Offsets in the input and in `(b, t, h)`, heads, and which entries exist: tiles (t, h)."""
    row = tl.program_id(1).to(tl.int64)
    time = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.arange(0, BH)
    exists = (time < T)[:, None] & (head < heads)[None, :]
    given = row * row_stride + (time * token_stride)[:, None] + head[None, :]
    own = ((row * T + time) * heads)[:, None] + head[None, :]
    return given, own, head, exists


@triton.jit(do_not_specialize=("T",))
def step_sizes(raw, bias, dt, T, row_stride, token_stride, least, most,
               H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """softplus(raw + bias) within [least, most]. Grid: tiles of tokens, rows.

    Args:
        raw: `(b, t, h)`.
        bias: `(h,)`.
        dt: `(b, t, h)`, contiguous.
    """
    ACC: tl.constexpr = dt.dtype.element_ty
    given, own, head, exists = _place(H, T, row_stride, token_stride, BT, BH)
    more = tl.load(bias + head, mask=head < H, other=0.0).to(ACC)
    value = tl.load(raw + given, mask=exists, other=0.0).to(ACC) + more[None, :]
    value = softplus(value)
    # Unlike a minimum and a maximum, this keeps NaN.
    value = tl.where(value < least, least, tl.where(value > most, most, value)).to(ACC)
    tl.store(dt + own, value, mask=exists)


@triton.jit(do_not_specialize=("T",))
def step_sizes_backward(raw, bias, grad, grad_raw, grad_bias, T, row_stride, token_stride,
                        least, most,
                        H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """The gradients of raw and bias.

    Args:
        grad: of dt, `(b, t, h)`, contiguous.
        grad_raw: `(b, t, h)`, contiguous.
        grad_bias: `(b, programs, h)`.
    """
    ACC: tl.constexpr = grad_bias.dtype.element_ty
    given, own, head, exists = _place(H, T, row_stride, token_stride, BT, BH)
    more = tl.load(bias + head, mask=head < H, other=0.0).to(ACC)
    value = tl.load(raw + given, mask=exists, other=0.0).to(ACC) + more[None, :]
    slope = 1.0 / (1.0 + tl.exp(-value))
    value = softplus(value)
    slope = tl.where((value < least) | (value > most), 0.0, slope)
    found = tl.load(grad + own, mask=exists, other=0.0).to(ACC) * slope
    found = tl.where(exists, found, 0.0)
    tl.store(grad_raw + own, found.to(grad_raw.dtype.element_ty), mask=exists)
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(grad_bias + program * H + head, tl.sum(found, 0), mask=head < H)


def forward(raw: Tensor, bias: Tensor, limit: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """dt of `longrnn.ops.steps.step_sizes`, `(b, t, h)` in `dtype`."""
    raw, bias = _inputs(raw, bias)
    dt = torch.empty(raw.shape, dtype=dtype, device=raw.device)
    with on_device(raw):
        step_sizes[_grid(raw)](
            raw, bias, dt, raw.shape[1], *raw.stride()[:2], *limit, **_sizes(raw)
        )
    return dt


def backward(
    raw: Tensor, bias: Tensor, limit: tuple[float, float], grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of raw and bias in their dtypes, from that of dt in the dtype of dt."""
    given, more = _inputs(raw, bias)
    grid, heads = _grid(given), raw.shape[2]
    grad_raw = torch.empty(raw.shape, dtype=given.dtype, device=raw.device)
    grad_bias = torch.empty(grid[1], grid[0], heads, dtype=grad.dtype, device=raw.device)
    with on_device(raw):
        step_sizes_backward[grid](
            given, more, grad.contiguous(), grad_raw, grad_bias,
            given.shape[1], *given.stride()[:2], *limit, **_sizes(given),
        )  # fmt: skip
    return grad_raw.to(raw.dtype), grad_bias.sum((0, 1)).to(bias.dtype)


def _inputs(raw: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    raw = raw if raw.stride(2) == 1 else raw.contiguous()
    return readable(raw), readable(bias.contiguous())


def _grid(raw: Tensor) -> tuple[int, int]:
    return triton.cdiv(raw.shape[1], TOKENS), raw.shape[0]


def _sizes(raw: Tensor) -> dict[str, Any]:
    heads = raw.shape[2]
    return {"H": heads, "BT": TOKENS, "BH": triton.next_power_of_2(heads), "num_warps": 4}
