# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
"""One token of Mamba-2 between the projections, up to the gated norm, in one kernel.

The convolution, dt, the update of the state, its read-out and D x. A program computes some channels
of one head of one row; those of a group compute the same B and C again, from a few kilobytes that
stay in the cache. States are read and written at different addresses, so that they remain values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import on_device, readable
from longrnn.ops.triton.chunk import decayed

# Channels of a head that a program computes: few, so that one row occupies the whole GPU.
CHANNELS = 16


class Weights(NamedTuple):
    """The parameters between the projections, up to the norm.

    Attributes:
        conv_weight: `(c, k)`.
        conv_bias: `(c,)` or None.
        dt_bias: `(h,)`.
        A_log: `(h,)`.
        D: `(h,)`.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor


@triton.jit
def softplus(value):
    """log(1 + exp(value)), with all digits where it is small."""
    power = tl.exp(-tl.abs(value))
    near = 1.0 + power
    small = near == 1.0
    log = tl.log(near) * (power / tl.where(small, 1.0, near - 1.0))
    return tl.maximum(value, 0.0) + tl.where(small, power, log)


@triton.jit
def _convolved(xBC, conv, conv_after, weight, bias, channel, exists, end,
               C: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BIAS: tl.constexpr,
               NARROW: tl.constexpr):  # fmt: skip
    """silu of the convolution of some channels; writes their new inputs.

    Args:
        xBC: the new inputs of a row.
        conv: its last k − 1 inputs, `(k − 1, c)`; its distance of tokens is c.
        conv_after: those after the token.
        channel: numbers of the channels.
        end: this program writes the channels before this one.
        NARROW: the dtype to which the other path rounds the result.
    """
    now = tl.load(xBC + channel, mask=exists, other=0.0)
    total = now.to(ACC) * tl.load(weight + channel * K + K - 1, mask=exists, other=0.0).to(ACC)
    if BIAS:
        total += tl.load(bias + channel, mask=exists, other=0.0).to(ACC)
    for tap in tl.static_range(K - 1):
        before = tl.load(conv + tap * C + channel, mask=exists, other=0.0)
        total += before.to(ACC) * tl.load(weight + channel * K + tap, mask=exists, other=0.0).to(
            ACC
        )
        if tap > 0:
            at = conv_after + (tap - 1) * C + channel
            tl.store(at, before.to(conv_after.dtype.element_ty), mask=exists & (channel < end))
    if K > 1:
        at = conv_after + (K - 2) * C + channel
        tl.store(at, now.to(conv_after.dtype.element_ty), mask=exists & (channel < end))
    return (total / (1.0 + tl.exp(-total))).to(NARROW).to(ACC)


@triton.jit
def advance(projected, conv, state, weight, bias, dt_bias, A_log, D, y, conv_after, state_after,
            row_stride, least, most,
            H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
            K: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
            NARROW: tl.constexpr):  # fmt: skip
    """One token. Grid: heads of all rows, tiles of channels.

    Args:
        projected: z, x B C and dt of each row, `row_stride` apart.
        conv: `(b, k − 1, c)`, contiguous.
        state: `(b, h, p, n)`, contiguous.
        y: `(b, h, p)`, contiguous.
        least, most: range of dt.
    """
    ACC: tl.constexpr = state.dtype.element_ty
    C: tl.constexpr = H * P + 2 * G * N
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    tile = tl.program_id(1)
    p, n = tile * BP + tl.arange(0, BP), tl.arange(0, BN)
    here, there = p < P, n < N
    row = projected + b * row_stride
    xBC, kept = row + H * P, conv + b * ((K - 1) * C)
    after = conv_after + b * ((K - 1) * C)
    x = _convolved(xBC, kept, after, weight, bias, h * P + p, here, C, C, K, ACC, BIAS, NARROW)
    # B and C of a group are written by the first program of its first head.
    end = tl.where(h % R + tile == 0, C, 0)
    of_B = H * P + h // R * N + n
    B = _convolved(xBC, kept, after, weight, bias, of_B, there, end, C, K, ACC, BIAS, NARROW)
    of_C = of_B + G * N
    read = _convolved(xBC, kept, after, weight, bias, of_C, there, end, C, K, ACC, BIAS, NARROW)
    raw = tl.load(row + H * P + C + h).to(ACC) + tl.load(dt_bias + h).to(ACC)
    dt = softplus(raw)
    dt = tl.where(dt < least, least, tl.where(dt > most, most, dt)).to(ACC)
    log_decay = (-tl.exp(tl.load(A_log + h).to(ACC)) * dt).to(ACC)
    offsets = program * (P * N) + p[:, None] * N + n[None, :]
    exists = here[:, None] & there[None, :]
    before = tl.load(state + offsets, mask=exists, other=0.0)
    added = (x * dt)[:, None] * B[None, :]
    now = decayed(before, added, log_decay.to(tl.float64), ACC)
    # The two parts of a decay have opposite signs: their products with ∞ would add up to NaN.
    infinite = tl.abs(before) == float("inf")
    now = tl.where(infinite, tl.exp(log_decay) * before + added, now)
    tl.store(state_after + offsets, now, mask=exists)
    out = tl.sum(now * read[None, :], 1) + tl.load(D + h).to(ACC) * x
    tl.store(y + program * P + p, out.to(y.dtype.element_ty), mask=here)


def step(
    projected: Tensor,
    weights: Weights,
    conv: Tensor,
    state: Tensor,
    *,
    groups: int,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """One token, without gradients.

    Args:
        projected: `(b, 1, h p + c + h)`, c = h p + 2 g n: z, x B C and dt.
        weights: see `Weights`.
        conv: `(b, k − 1, c)`, the last inputs of the convolution.
        state: `(b, h, p, n)`.
        groups: g.
        dt_limit: least and largest dt.

    Returns:
        y + D x `(b, 1, h p)` in the dtype of the state, and both states after the token.
    """
    b, h, p, n = state.shape
    k = weights.conv_weight.shape[1]
    narrow = projected.dtype
    projected = readable(projected[:, 0])
    projected = projected if projected.stride(1) == 1 else projected.contiguous()
    state, kept = state.contiguous(), readable(conv.contiguous())
    bias = weights.conv_weight if weights.conv_bias is None else weights.conv_bias
    given = [readable(one.contiguous()) for one in (weights.conv_weight, bias, *weights[2:])]
    y = torch.empty(b, 1, h * p, dtype=state.dtype, device=state.device)
    after, state_after = torch.empty_like(kept), torch.empty_like(state)
    with on_device(state):
        advance[b * h, triton.cdiv(p, min(CHANNELS, triton.next_power_of_2(p)))](
            projected, kept, state, *given, y, after, state_after, projected.stride(0), *dt_limit,
            H=h, R=h // groups, P=p, N=n, G=groups, K=k,
            BP=min(CHANNELS, triton.next_power_of_2(p)), BN=triton.next_power_of_2(n),
            BIAS=weights.conv_bias is not None, NARROW=_type(narrow), num_warps=4,
        )  # fmt: skip
    return y, after.to(conv.dtype), state_after


def _type(dtype: torch.dtype) -> tl.dtype:
    """The type of Triton for a dtype; the interpreter computes wrong numbers in bfloat16."""
    kept = readable(torch.empty(0, dtype=dtype)).dtype
    return getattr(tl, str(kept).removeprefix("torch."))
