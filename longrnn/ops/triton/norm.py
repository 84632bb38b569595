# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
"""RMSNorm of rows, plain and gated, and D x added before it, forward and backward.

A program computes one group of channels of some rows. Gradients of the weight are added up by each
program over its rows, and then over programs by torch, so that two runs give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import on_device, readable

# Programs of the backward pass per group, each with its own sum of the weight's gradient.
PROGRAMS = 512


class Normed(NamedTuple):
    """What `forward` returns.

    Attributes:
        y: the result, `(…, d)`.
        scale: 1 / rms per row and group, in float32 or wider.
        total: what was normalised or gated, in the dtype of the result; None if not wanted.
    """

    y: Tensor
    scale: Tensor
    total: Tensor | None


class Gradients(NamedTuple):
    """Gradients, of what was given."""

    x: Tensor
    gate: Tensor | None
    weight: Tensor
    skip: Tensor | None
    D: Tensor | None


@triton.jit
def normalise(x, gate, skip, D, weight, y, scales, total, x_row, gate_row, skip_row, eps,
              G: tl.constexpr, W: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
              ACC: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr,
              TOTAL: tl.constexpr):  # fmt: skip
    """y of one group of one row. Grid: rows × groups.

    Args:
        x: `(rows, G W)`.
        gate: GATED: `(rows, G W)`.
        skip: SKIP: `(rows, G W)`, added to x times the number of its head.
        D: SKIP: `(heads,)`, for HEAD channels each.
        weight: `(G W,)`.
        y: `(rows, G W)`, contiguous.
        scales: `(rows, G)`.
        total: TOTAL: x + D skip, `(rows, G W)`, contiguous.
    """
    program = tl.program_id(0).to(tl.int64)
    row, group = program // G, program % G
    column = tl.arange(0, BLOCK)
    exists = column < W
    at = group * W + column
    value = tl.load(x + row * x_row + at, mask=exists, other=0.0).to(ACC)
    if SKIP:
        more = tl.load(skip + row * skip_row + at, mask=exists, other=0.0).to(ACC)
        value += tl.load(D + at // HEAD, mask=exists, other=0.0).to(ACC) * more
    if TOTAL:
        of_total = total + row * (G * W) + at
        tl.store(of_total, value.to(total.dtype.element_ty), mask=exists)
    if GATED:
        raw = tl.load(gate + row * gate_row + at, mask=exists, other=0.0).to(ACC)
        value *= raw / (1.0 + tl.exp(-raw))
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / W + eps)
    factor = tl.load(weight + at, mask=exists, other=0.0).to(ACC)
    tl.store(y + row * (G * W) + at, (value * scale * factor).to(y.dtype.element_ty), mask=exists)
    tl.store(scales + program, scale)


@triton.jit(do_not_specialize=("rows",))
def normalise_backward(
    total, gate, skip, D, weight, scales, grad, grad_x, grad_gate, grad_skip, grad_weight, grad_D,
    total_row, gate_row, skip_row, grad_row, rows,
    G: tl.constexpr, W: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Gradients of one group of some rows. Grid: programs, groups.

    Args:
        total: TOTAL: x + D skip, otherwise x, `(rows, G W)`.
        gate: GATED: `(rows, G W)`.
        skip: SKIP: `(rows, G W)`.
        D: SKIP: `(heads,)`.
        weight: `(G W,)`.
        scales: `(rows, G)`.
        grad: of y, `(rows, G W)`.
        grad_x: `(rows, G W)`, contiguous, as the next two.
        grad_gate: GATED.
        grad_skip: SKIP.
        grad_weight: `(programs, G W)` in `ACC`.
        grad_D: SKIP: likewise, per channel.
    """
    first, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < W
    at = group * W + column
    factor = tl.load(weight + at, mask=exists, other=0.0).to(ACC)
    of_weight = tl.zeros((BLOCK,), ACC)
    of_D = tl.zeros((BLOCK,), ACC)
    for row in range(first, rows, tl.num_programs(0)):
        value = tl.load(total + row * total_row + at, mask=exists, other=0.0).to(ACC)
        if SKIP:
            more = tl.load(skip + row * skip_row + at, mask=exists, other=0.0).to(ACC)
            by_head = tl.load(D + at // HEAD, mask=exists, other=0.0).to(ACC)
            if not TOTAL:
                value += by_head * more
        inner = value
        if GATED:
            raw = tl.load(gate + row * gate_row + at, mask=exists, other=0.0).to(ACC)
            sigmoid = 1.0 / (1.0 + tl.exp(-raw))
            inner = value * raw * sigmoid
        scale = tl.load(scales + row * G + group).to(ACC)
        own = tl.load(grad + row * grad_row + at, mask=exists, other=0.0).to(ACC)
        of_weight += own * inner * scale
        own *= factor
        cross = tl.sum(own * inner, 0) / W * scale * scale
        own = (own - inner * cross) * scale
        here = row * (G * W) + at
        if GATED:
            slope = sigmoid * (1.0 + raw * (1.0 - sigmoid))
            of_gate = own * value * slope
            tl.store(grad_gate + here, of_gate.to(grad_gate.dtype.element_ty), mask=exists)
            own *= raw * sigmoid
        tl.store(grad_x + here, own.to(grad_x.dtype.element_ty), mask=exists)
        if SKIP:
            of_D += own * more
            of_skip = own * by_head
            tl.store(grad_skip + here, of_skip.to(grad_skip.dtype.element_ty), mask=exists)
    tl.store(grad_weight + first * (G * W) + at, of_weight, mask=exists)
    if SKIP:
        tl.store(grad_D + first * (G * W) + at, of_D, mask=exists)


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    groups: int = 1,
    *,
    gate: Tensor | None = None,
    skip: Tensor | None = None,
    D: Tensor | None = None,
    dtype: torch.dtype,
    keep: bool = False,
) -> Normed:
    """The norm of `longrnn.ops.norm`.

    Args:
        x: `(…, d)`.
        weight: `(d,)`.
        eps: added to the mean square.
        groups: a divisor of d.
        gate: `(…, d)` to multiply by silu of it, or None.
        skip: `(…, d)`, added to x times D; None for nothing.
        D: `(h,)`, a divisor of d.
        dtype: of the result.
        keep: whether `total` is wanted.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    d = x.shape[-1]
    rows = x.numel() // d
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(rows, groups, dtype=wide, device=x.device)
    values, written = rows_of(x), readable(y)
    gates, skips, factors = _others(values, gate, skip, D)
    total = torch.empty(rows, d, dtype=written.dtype, device=x.device) if keep else values
    with on_device(x):
        normalise[(rows * groups,)](
            values, gates, skips, factors, readable(weight.contiguous()), written, scale, total,
            values.stride(0), gates.stride(0), skips.stride(0), eps,
            **_sizes(d, groups, D, wide), GATED=gate is not None, TOTAL=keep,
        )  # fmt: skip
    if written is not y:
        y.copy_(written)
    return Normed(y, scale, total.to(dtype).view(x.shape) if keep else None)


def backward(
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    grad: Tensor,
    groups: int = 1,
    *,
    gate: Tensor | None = None,
    skip: Tensor | None = None,
    D: Tensor | None = None,
    is_total: bool = False,
    dtype: torch.dtype,
) -> Gradients:
    """The gradients of x in `dtype`, and of the other tensors in their own.

    Args:
        total: x, or x + D skip, `(…, d)`.
        weight: `(d,)`.
        scale: from `forward`.
        grad: of the result, `(…, d)`.
        groups: as in `forward`, like the next three.
        gate: see above.
        skip: see above.
        D: see above.
        is_total: whether `total` contains D skip.
        dtype: of the gradient of x.
    """
    d = total.shape[-1]
    rows = total.numel() // d
    values, own = rows_of(total), rows_of(grad)
    gates, skips, factors = _others(values, gate, skip, D)

    def like(one: Tensor | None, dtype: torch.dtype) -> Tensor:
        return own if one is None else torch.empty(rows, d, dtype=dtype, device=own.device)

    grad_x, grad_gate = like(total, stored(dtype)), like(gate, gates.dtype)
    grad_skip = like(skip, skips.dtype)
    sums = torch.empty(2, min(rows, PROGRAMS), d, dtype=scale.dtype, device=own.device)
    with on_device(total):
        normalise_backward[min(rows, PROGRAMS), groups](
            values, gates, skips, factors, readable(weight.contiguous()), scale, own,
            grad_x, grad_gate, grad_skip, sums[0], sums[1],
            values.stride(0), gates.stride(0), skips.stride(0), own.stride(0), rows,
            **_sizes(d, groups, D, scale.dtype), GATED=gate is not None, TOTAL=is_total,
        )  # fmt: skip
    return Gradients(
        grad_x.to(dtype).view(total.shape),
        None if gate is None else grad_gate.to(gate.dtype).view(gate.shape),
        sums[0].sum(0).to(weight.dtype),
        None if skip is None else grad_skip.to(skip.dtype).view(skip.shape),
        None if D is None else sums[1].sum(0).view(len(D), -1).sum(1).to(D.dtype),
    )


def _others(
    values: Tensor, gate: Tensor | None, skip: Tensor | None, D: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, skip and D as kernels read them; any tensor in place of those that are None."""
    return (
        values if gate is None else rows_of(gate),
        values if skip is None else rows_of(skip),
        values if D is None else readable(D.contiguous()),
    )


def _sizes(d: int, groups: int, D: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    width = d // groups
    return {
        "G": groups,
        "W": width,
        "HEAD": 1 if D is None else d // len(D),
        "BLOCK": triton.next_power_of_2(width),
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "SKIP": D is not None,
        "num_warps": warps(width),
    }


def warps(width: int) -> int:
    """Warps of a program that holds `width` numbers: 32 threads hold at most 32 each."""
    return min(16, max(1, triton.next_power_of_2(width) // 1024))


def rows_of(tensor: Tensor) -> Tensor:
    """`(rows, d)` with a contiguous last axis; a view of a wider tensor stays one."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return readable(tensor.flatten(0, -2))


def stored(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels store values of a dtype: see `readable`."""
    return readable(torch.empty(0, dtype=dtype)).dtype
