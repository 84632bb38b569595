# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
"""The causal depthwise convolution and its activation, forward and backward.

Notable choices:
- A tile holds some tokens of some channels. The k − 1 tokens before it come from the same row or
  from the state, and are read once per tap, from the cache.
- The backward pass computes the sums before the activation again, for the k tokens that read an
  input, which takes k² products per entry and no memory.
- Gradients of weights are added up by each program over its span of tokens, and then over
  programs by torch: no atomic additions, so that two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import on_device, readable

# Tokens and channels of a tile, and tokens in the backward pass, which holds more tiles at a time.
TOKENS, CHANNELS, BACKWARD_TOKENS = 32, 128, 8
# Tokens that one program of the backward pass adds up.
SPAN = 1024


@triton.jit
def _input(x, state, row, time, channel, exists, T, x_row, x_token, C: tl.constexpr,
           K: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Inputs at `time`, which may be up to k − 1 before the first token: `(i, channel)`.

    Args:
        x: `(b, t, c)` with any strides of row and token.
        state: `(b, k − 1, c)`, contiguous.
        row: of the batch, int64.
        time: `(i,)` int64.
        channel: `(channel,)`.
        exists: `(channel,)`, which channels exist.
    """
    given = ((time >= 0) & (time < T))[:, None] & exists[None, :]
    now = tl.load(x + row * x_row + (time * x_token)[:, None] + channel[None, :],
                  mask=given, other=0.0)  # fmt: skip
    kept = ((time < 0) & (time > -K))[:, None] & exists[None, :]
    at = (row * (K - 1) + time + (K - 1)) * C
    before = tl.load(state + at[:, None] + channel[None, :], mask=kept, other=0.0)
    return now.to(ACC) + before.to(ACC)


@triton.jit
def _sums(x, state, weight, bias, row, time, channel, exists, T, x_row, x_token,
          C: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The sums before the activation at `time`, `(i, channel)`."""
    if BIAS:
        own = tl.load(bias + channel, mask=exists, other=0.0).to(ACC)
        total = tl.zeros((time.shape[0], channel.shape[0]), ACC) + own[None, :]
    else:
        total = tl.zeros((time.shape[0], channel.shape[0]), ACC)
    for tap in tl.static_range(K):
        factor = tl.load(weight + channel * K + tap, mask=exists, other=0.0).to(ACC)
        values = _input(x, state, row, time - (K - 1) + tap, channel, exists, T, x_row, x_token,
                        C, K, ACC)  # fmt: skip
        total += values * factor[None, :]
    return total


@triton.jit(do_not_specialize=("T",))
def convolve(x, state, weight, bias, y, T, x_row, x_token,
             C: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
             ACC: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """y `(b, t, c)`, contiguous. Grid: tiles of tokens, tiles of channels, rows."""
    row = tl.program_id(2).to(tl.int64)
    time = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    exists = channel < C
    total = _sums(x, state, weight, bias, row, time, channel, exists, T, x_row, x_token,
                  C, K, ACC, BIAS)  # fmt: skip
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    at = y + ((row * T + time) * C)[:, None] + channel[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(time < T)[:, None] & exists[None, :])


@triton.jit
def _grad_sums(x, state, weight, bias, grad_y, row, time, channel, exists, T, x_row, x_token,
               g_row, g_token, C: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr,
               BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """The gradient of the sums before the activation at `time`, `(i, channel)`; 0 from T on."""
    given = ((time >= 0) & (time < T))[:, None] & exists[None, :]
    grad = tl.load(grad_y + row * g_row + (time * g_token)[:, None] + channel[None, :],
                   mask=given, other=0.0).to(ACC)  # fmt: skip
    if SILU:
        total = _sums(x, state, weight, bias, row, time, channel, exists, T, x_row, x_token,
                      C, K, ACC, BIAS)  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-total))
        grad *= gate * (1.0 + total * (1.0 - gate))
    return grad


@triton.jit(do_not_specialize=("T", "SPANS"))
def convolve_backward(
    x, state, weight, bias, grad_y, grad_x, grad_state, grad_weight, grad_bias,
    T, SPANS, x_row, x_token, g_row, g_token,
    C: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
    ACC: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """All gradients of `convolve`. Grid: spans of tokens, tiles of channels, rows.

    Args:
        grad_x: `(b, t, c)`, contiguous.
        grad_state: `(b, k − 1, c)`, contiguous.
        grad_weight: WEIGHTS: `(b, spans, k, c)` in `ACC`.
        grad_bias: WEIGHTS and BIAS: `(b, spans, c)` in `ACC`.
    """
    span, row = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    exists = channel < C
    tap = tl.arange(0, triton.next_power_of_2(K))
    by_tap = tl.zeros((triton.next_power_of_2(K), BC), ACC)
    of_bias = tl.zeros((BC,), ACC)
    first = span * SPAN
    for start in range(0, tl.minimum(T - first, SPAN).to(tl.int32), BT):
        time = first + start + tl.arange(0, BT)
        total = tl.zeros((BT, BC), ACC)
        for later in tl.static_range(K):
            # The token `later` after an input reads it with this tap.
            grad = _grad_sums(x, state, weight, bias, grad_y, row, time + later, channel, exists,
                              T, x_row, x_token, g_row, g_token, C, K, ACC, BIAS, SILU)  # fmt: skip
            factor = tl.load(weight + channel * K + (K - 1 - later), mask=exists, other=0.0)
            total += grad * factor.to(ACC)[None, :]
            if WEIGHTS and later == 0:
                of_bias += tl.sum(grad, 0)
                for j in tl.static_range(K):
                    values = _input(x, state, row, time - (K - 1) + j, channel, exists, T,
                                    x_row, x_token, C, K, ACC)  # fmt: skip
                    products = tl.sum(grad * values, 0)
                    by_tap += tl.where((tap == j)[:, None], products[None, :], 0.0)
        of_x = grad_x + ((row * T + time) * C)[:, None] + channel[None, :]
        tl.store(of_x, total.to(grad_x.dtype.element_ty),
                 mask=(time < T)[:, None] & exists[None, :])  # fmt: skip
    if WEIGHTS:
        part = row * SPANS + span
        of_weight = grad_weight + part * (K * C) + tap[:, None] * C + channel[None, :]
        tl.store(of_weight, by_tap, mask=(tap < K)[:, None] & exists[None, :])
        if BIAS:
            tl.store(grad_bias + part * C + channel, of_bias, mask=exists)
    if span == 0 and K > 1:
        # Inputs before the first token, which only the first k − 1 tokens read.
        before = tap.to(tl.int64) - (K - 1)
        total = tl.zeros((triton.next_power_of_2(K), BC), ACC)
        for later in tl.static_range(K):
            grad = _grad_sums(x, state, weight, bias, grad_y, row, before + later, channel, exists,
                              T, x_row, x_token, g_row, g_token, C, K, ACC, BIAS, SILU)  # fmt: skip
            factor = tl.load(weight + channel * K + (K - 1 - later), mask=exists, other=0.0)
            total += grad * factor.to(ACC)[None, :]
        of_state = grad_state + (row * (K - 1) + tap)[:, None] * C + channel[None, :]
        tl.store(of_state, total.to(grad_state.dtype.element_ty),
                 mask=(tap < K - 1)[:, None] & exists[None, :])  # fmt: skip


def forward(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool
) -> Tensor:
    """y of `longrnn.ops.conv.causal_conv`, in the dtype of x.

    Args:
        x: `(b, t, c)`; its last axis is contiguous, or it is copied.
        state: `(b, k − 1, c)`.
        weight: `(c, k)`.
        bias: `(c,)` or None.
        activation: whether to apply silu.
    """
    b, time, c = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inputs = _inputs(x, state, weight, bias)
    written = readable(y)
    with on_device(x):
        convolve[triton.cdiv(time, TOKENS), triton.cdiv(c, CHANNELS), b](
            *inputs, written, time, *inputs[0].stride()[:2], **_sizes(weight, bias, x, activation)
        )
    return y if written is y else y.copy_(written)


def backward(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: bool,
    grad_y: Tensor,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, state, weight and bias, in their dtypes.

    Args:
        x: as in `forward`, like the next four.
        state: see above.
        weight: see above.
        bias: see above.
        activation: see above.
        grad_y: `(b, t, c)`.
        wants_weights: whether the gradients of weight and bias are computed; None otherwise.
    """
    (b, time, c), k = x.shape, weight.shape[1]
    wide = _wide(x, weight)
    spans = triton.cdiv(time, SPAN)
    inputs, grad_y = _inputs(x, state, weight, bias), readable(_packed(grad_y))
    grad_x = torch.empty(x.shape, dtype=inputs[0].dtype, device=x.device)
    grad_state = torch.empty(state.shape, dtype=inputs[1].dtype, device=x.device)
    grad_weight = torch.empty(b, spans, k, c, dtype=wide, device=x.device)
    grad_bias = torch.empty(b, spans, c, dtype=wide, device=x.device)
    with on_device(x):
        convolve_backward[spans, triton.cdiv(c, CHANNELS), b](
            *inputs, grad_y, grad_x, grad_state, grad_weight, grad_bias, time, spans,
            *inputs[0].stride()[:2], *grad_y.stride()[:2],
            **_sizes(weight, bias, x, activation) | {"BT": BACKWARD_TOKENS},
            SPAN=SPAN, WEIGHTS=wants_weights,
        )  # fmt: skip
    of_weight = of_bias = None
    if wants_weights:
        of_weight = grad_weight.sum((0, 1)).t().to(weight.dtype)
        of_bias = None if bias is None else grad_bias.sum((0, 1)).to(bias.dtype)
    return grad_x.to(x.dtype), grad_state.to(state.dtype), of_weight, of_bias


def _wide(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _packed(tensor: Tensor) -> Tensor:
    """A tensor whose last axis is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _inputs(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    given = [_packed(x), state.contiguous(), weight.contiguous()]
    # A pointer is needed also where no bias is read.
    given.append(given[2] if bias is None else bias.contiguous())
    return [readable(tensor) for tensor in given]


def _sizes(weight: Tensor, bias: Tensor | None, x: Tensor, activation: bool) -> dict[str, Any]:
    double = _wide(x, weight) == torch.float64
    return {
        "C": weight.shape[0],
        "K": weight.shape[1],
        "BT": TOKENS,
        "BC": CHANNELS,
        "ACC": tl.float64 if double else tl.float32,
        "BIAS": bias is not None,
        "SILU": activation,
        "num_warps": 4,
    }
