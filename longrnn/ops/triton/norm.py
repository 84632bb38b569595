"""RMSNorm of rows, plain, gated and with a residual added, forward and backward.

A program computes one group of channels of some rows. Gradients of the weight are added up by each
program over its rows, and then over programs by torch, so that two runs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import on_device, readable

# Programs of the backward pass per group, each with its own sum of the weight's gradient.
PROGRAMS = 512
# The widest group that fits into the registers of a program.
WIDEST = 16384


class Normed(NamedTuple):
    """What `forward` returns.

    Attributes:
        y: the result.
        scale: 1 / rms per row and group, in float32 or wider.
        total: x plus the residual, in the dtype of x; x itself without one.
    """

    y: Tensor
    scale: Tensor
    total: Tensor


@triton.jit
def normalise(x, other, weight, y, scales, total, x_row, other_row, eps,
              G: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
              GATED: tl.constexpr, ADDED: tl.constexpr):  # fmt: skip
    """y of one group of one row. Grid: rows × groups.

    Args:
        x: `(rows, G W)`.
        other: GATED: the gate; ADDED: the residual; `(rows, G W)`.
        weight: `(G W,)`.
        y: `(rows, G W)`, contiguous.
        scales: `(rows, G)`.
        total: ADDED: x + other, contiguous.
    """
    program = tl.program_id(0).to(tl.int64)
    row, group = program // G, program % G
    column = tl.arange(0, BLOCK)
    exists = column < W
    at = group * W + column
    value = tl.load(x + row * x_row + at, mask=exists, other=0.0).to(ACC)
    if GATED:
        gate = tl.load(other + row * other_row + at, mask=exists, other=0.0).to(ACC)
        value *= gate / (1.0 + tl.exp(-gate))
    if ADDED:
        value += tl.load(other + row * other_row + at, mask=exists, other=0.0).to(ACC)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * (G * W) + at, rounded, mask=exists)
        value = rounded.to(ACC)  # what the next layer reads
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / W + eps)
    factor = tl.load(weight + at, mask=exists, other=0.0).to(ACC)
    tl.store(y + row * (G * W) + at, (value * scale * factor).to(y.dtype.element_ty), mask=exists)
    tl.store(scales + program, scale)


@triton.jit(do_not_specialize=("rows",))
def normalise_backward(
    x, gate, weight, scales, grad, more, grad_x, grad_gate, grad_weight,
    x_row, gate_row, grad_row, more_row, rows,
    G: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
    GATED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Gradients of one group of every PROGRAMS-th row. Grid: programs, groups.

    Args:
        x: `(rows, G W)`; with a residual, the sum.
        gate: GATED: `(rows, G W)`.
        weight: `(G W,)`.
        scales: `(rows, G)`.
        grad: of y, `(rows, G W)`.
        more: ADDED: the gradient of the sum, `(rows, G W)`.
        grad_x: `(rows, G W)`, contiguous.
        grad_gate: GATED: `(rows, G W)`, contiguous.
        grad_weight: `(programs, G W)` in `ACC`.
    """
    first, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < W
    at = group * W + column
    factor = tl.load(weight + at, mask=exists, other=0.0).to(ACC)
    of_weight = tl.zeros((BLOCK,), ACC)
    for row in range(first, rows, tl.num_programs(0)):
        value = tl.load(x + row * x_row + at, mask=exists, other=0.0).to(ACC)
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
        if ADDED:
            own += tl.load(more + row * more_row + at, mask=exists, other=0.0).to(ACC)
        if GATED:
            slope = sigmoid * (1.0 + raw * (1.0 - sigmoid))
            of_gate = own * value * slope
            tl.store(grad_gate + row * (G * W) + at, of_gate.to(grad_gate.dtype.element_ty),
                     mask=exists)  # fmt: skip
            own *= raw * sigmoid
        tl.store(grad_x + row * (G * W) + at, own.to(grad_x.dtype.element_ty), mask=exists)
    tl.store(grad_weight + first * (G * W) + at, of_weight, mask=exists)


def suits(x: Tensor, groups: int) -> bool:
    """Whether a group of channels fits into a program."""
    return 0 < x.shape[-1] // groups <= WIDEST and x.numel() > 0


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    groups: int = 1,
    *,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype,
) -> Normed:
    """The norm of `longrnn.ops.norm`.

    Args:
        x: `(…, d)`.
        weight: `(d,)`.
        eps: added to the mean square.
        groups: a divisor of d.
        gate: `(…, d)` to multiply x with silu of it, or None.
        residual: `(…, d)` to add to x, or None; not both.
        dtype: of the result.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, d = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(rows, groups, dtype=wide, device=x.device)
    values, weight = _rows(x), readable(weight.contiguous())
    given = gate if gate is not None else residual
    other = values if given is None else _rows(given)
    written = readable(y)
    total = values
    if residual is not None:
        total = torch.empty(rows, d, dtype=values.dtype, device=x.device)
    with on_device(x):
        normalise[(rows * groups,)](
            values, other, weight, written, scale, total, values.stride(0), other.stride(0), eps,
            G=groups, W=d // groups, BLOCK=triton.next_power_of_2(d // groups), ACC=_acc(wide),
            GATED=gate is not None, ADDED=residual is not None, num_warps=_warps(d // groups),
        )  # fmt: skip
    if written is not y:
        y.copy_(written)
    return Normed(y, scale, x if residual is None else total.to(x.dtype).view(x.shape))


def backward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    grad: Tensor,
    groups: int = 1,
    *,
    gate: Tensor | None = None,
    grad_total: Tensor | None = None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of x in `dtype`, of the gate, and of the weight.

    Args:
        x: `(…, d)`; with a residual, the sum, whose gradient is that of both.
        weight: `(d,)`.
        scale: from `forward`.
        grad: of the result, `(…, d)`.
        groups: as in `forward`.
        gate: likewise.
        grad_total: of the sum with the residual; None for 0.
        dtype: of the gradient of x.
    """
    rows, d = x.numel() // x.shape[-1], x.shape[-1]
    programs = min(rows, PROGRAMS)
    values, own = _rows(x), _rows(grad)
    gates = values if gate is None else _rows(gate)
    more = own if grad_total is None else _rows(grad_total)
    grad_x = torch.empty(rows, d, dtype=_stored(dtype), device=x.device)
    grad_gate = (
        torch.empty(rows, d, dtype=gates.dtype, device=x.device) if gate is not None else own
    )
    grad_weight = torch.empty(programs, d, dtype=scale.dtype, device=x.device)
    with on_device(x):
        normalise_backward[programs, groups](
            values, gates, readable(weight.contiguous()), scale, own, more,
            grad_x, grad_gate, grad_weight,
            values.stride(0), gates.stride(0), own.stride(0), more.stride(0), rows,
            G=groups, W=d // groups, BLOCK=triton.next_power_of_2(d // groups),
            ACC=_acc(scale.dtype), GATED=gate is not None, ADDED=grad_total is not None,
            num_warps=_warps(d // groups),
        )  # fmt: skip
    of_gate = None if gate is None else grad_gate.to(gate.dtype).view(gate.shape)
    return grad_x.to(dtype).view(x.shape), of_gate, grad_weight.sum(0).to(weight.dtype)


def _rows(tensor: Tensor) -> Tensor:
    """`(rows, d)` with a contiguous last axis; a view of a wider tensor stays one."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return readable(tensor.flatten(0, -2))


def _stored(dtype: torch.dtype) -> torch.dtype:
    return readable(torch.empty(0, dtype=dtype)).dtype


def _acc(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _warps(width: int) -> int:
    """32 threads hold at most 32 entries each."""
    return min(16, max(1, triton.next_power_of_2(width) // 1024))
