# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
"""The sum of a residual connection and the RMSNorm after it, forward and backward.

Notable choices:
- One program computes one row. It normalises the sum as it is stored, so that the backward pass
  reads what was normalised, and the result is that of two operations.
- The norm may be stored in a narrower dtype than the sum, that of the projection that reads it.
- The backward pass adds the two gradients of the sum before it rounds them. As in
  `longrnn.ops.triton.norm`, each program adds up the weight's gradient over its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import on_device, readable
from longrnn.ops.triton.norm import PROGRAMS, rows_of, stored, warps


class Added(NamedTuple):
    """What `forward` returns.

    Attributes:
        total: x + branch, `(…, d)`.
        y: the norm of it, `(…, d)`.
        scale: 1 / rms per row, in float32 or wider.
    """

    total: Tensor
    y: Tensor
    scale: Tensor


class Gradients(NamedTuple):
    """Gradients, of what was given."""

    x: Tensor
    branch: Tensor
    weight: Tensor


@triton.jit
def add_and_normalise(x, branch, weight, total, y, scales, x_row, branch_row, eps,
                      W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """The sum and its norm of one row. Grid: rows.

    Args:
        x: `(rows, W)`.
        branch: `(rows, W)`.
        weight: `(W,)`.
        total: `(rows, W)`, contiguous, as y.
        y: the norm.
        scales: `(rows,)`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < W
    value = tl.load(x + row * x_row + column, mask=exists, other=0.0).to(ACC)
    value += tl.load(branch + row * branch_row + column, mask=exists, other=0.0).to(ACC)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row * W + column, rounded, mask=exists)
    value = rounded.to(ACC)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / W + eps)
    factor = tl.load(weight + column, mask=exists, other=0.0).to(ACC)
    tl.store(y + row * W + column, (value * scale * factor).to(y.dtype.element_ty), mask=exists)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=("rows",))
def add_and_normalise_backward(
    total, weight, scales, grad_total, grad_y, grad_x, grad_branch, grad_weight,
    grad_total_row, grad_y_row, rows,
    W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows. Grid: programs.

    Args:
        total: `(rows, W)`, contiguous.
        weight: `(W,)`.
        scales: `(rows,)`.
        grad_total: `(rows, W)`; None for zeros.
        grad_y: `(rows, W)`.
        grad_x: `(rows, W)`, contiguous, as the next one.
        grad_branch: the same numbers in another dtype; None if that of x is theirs.
        grad_weight: `(programs, W)` in `ACC`.
    """
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < W
    factor = tl.load(weight + column, mask=exists, other=0.0).to(ACC)
    of_weight = tl.zeros((BLOCK,), ACC)
    for row in range(first, rows, tl.num_programs(0)):
        value = tl.load(total + row * W + column, mask=exists, other=0.0).to(ACC)
        own = tl.load(grad_y + row * grad_y_row + column, mask=exists, other=0.0).to(ACC)
        scale = tl.load(scales + row).to(ACC)
        of_weight += own * value * scale
        own *= factor
        cross = tl.sum(own * value, 0) / W * scale * scale
        own = (own - value * cross) * scale
        if grad_total is not None:
            at = grad_total + row * grad_total_row + column
            own += tl.load(at, mask=exists, other=0.0).to(ACC)
        here = row * W + column
        tl.store(grad_x + here, own.to(grad_x.dtype.element_ty), mask=exists)
        if grad_branch is not None:
            tl.store(grad_branch + here, own.to(grad_branch.dtype.element_ty), mask=exists)
    tl.store(grad_weight + first * W + column, of_weight, mask=exists)


def forward(x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Added:
    """The sum, in the wider dtype of the two, and its norm.

    Args:
        x: `(…, d)`.
        branch: `(…, d)`.
        weight: `(d,)`.
        eps: added to the mean square.
        dtype: of the norm.
    """
    d = x.shape[-1]
    wide = torch.promote_types(x.dtype, branch.dtype)
    acc = torch.promote_types(wide, torch.float32)
    values, branches = rows_of(x), rows_of(branch)
    total, y = (_empty(values, one) for one in (wide, dtype))
    scale = torch.empty(len(values), dtype=acc, device=x.device)
    with on_device(x):
        add_and_normalise[(len(values),)](
            values, branches, readable(weight.contiguous()), total, y, scale,
            values.stride(0), branches.stride(0), eps, **_sizes(d, acc),
        )  # fmt: skip
    return Added(total.to(wide).view(x.shape), y.to(dtype).view(x.shape), scale)


def backward(
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    grad_total: Tensor | None,
    grad_y: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Gradients:
    """The gradients of what `forward` was given.

    Args:
        total: from `forward`.
        weight: `(d,)`.
        scale: from `forward`.
        grad_total: of the sum, `(…, d)`; None for zeros.
        grad_y: of the norm, `(…, d)`.
        dtypes: of x and of the branch.
    """
    d = total.shape[-1]
    values, own = rows_of(total), rows_of(grad_y)
    carried = None if grad_total is None else rows_of(grad_total)
    same = dtypes[0] == dtypes[1]
    grad_x = _empty(values, dtypes[0])
    grad_branch = None if same else _empty(values, dtypes[1])
    programs = min(len(values), PROGRAMS)
    sums = torch.empty(programs, d, dtype=scale.dtype, device=total.device)
    with on_device(total):
        add_and_normalise_backward[(programs,)](
            values, readable(weight.contiguous()), scale, carried, own, grad_x, grad_branch, sums,
            0 if carried is None else carried.stride(0), own.stride(0), len(values),
            **_sizes(d, scale.dtype),
        )  # fmt: skip
    of_x = grad_x.to(dtypes[0]).view(total.shape)
    of_branch = of_x if grad_branch is None else grad_branch.to(dtypes[1]).view(total.shape)
    return Gradients(of_x, of_branch, sums.sum(0).to(weight.dtype))


def _empty(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of `rows` that kernels write values of a dtype into."""
    return torch.empty(rows.shape, dtype=stored(dtype), device=rows.device)


def _sizes(d: int, dtype: torch.dtype) -> dict[str, Any]:
    acc = tl.float64 if dtype == torch.float64 else tl.float32
    return {"W": d, "BLOCK": triton.next_power_of_2(d), "ACC": acc, "num_warps": warps(d)}
