"""Causal depthwise convolution over time, with an explicit state.

Notable choices:
- For the usual filter of four tokens, adding up the terms one by one is faster on a CPU than
  `conv1d`, in every dtype, and any split gives the same bits.
- The activation is part of the operation: its backward pass computes the sum before it again, which
  costs as much as reading it back from memory, and keeps only the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.again import gradients_of
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.transforms import takes_plain_operations


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: bool = False,
    rows: PackedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves each channel with its own filter over the current token and the k − 1 before it.

    y_t = Σ_j weight[:, j] · x_{t−k+1+j} (+ bias), or silu of it. The sum is computed in float32 or
    wider, and the result is rounded once.

    Args:
        x: `(b, t, c)`.
        weight: `(c, k)`; the last column is the weight of the current token.
        bias: `(c,)` or None.
        state: `(b, k − 1, c)`, the inputs that precede `x`.
        activation: whether to apply silu to the sum.
        rows: where documents and padding begin; None for rows of one document without padding. No
            term comes from another document, and the state is that after the last token before
            the padding.

    Returns:
        `y` of shape `(b, t, c)`, in the dtype of `x`, and the state after the last token, in the
        dtype of `state`.
    """
    if rows is not None:
        y = _convolved(x, state, weight, bias, False)
        padded = torch.cat([state.to(x.dtype), x], dim=1)
        y = _at_starts(y, padded, weight, bias, rows)
        after = _last_inputs(padded, weight.shape[1] - 1, rows).to(state.dtype)
        return F.silu(y) if activation else y, after
    y = _convolved(x, state, weight, bias, activation)
    width, time = state.shape[1], x.shape[1]
    # Copies, because a slice would keep the whole input in memory.
    after = x[:, max(0, time - width) :].to(state.dtype, copy=True)
    if time < width:
        after = torch.cat([state[:, time:], after], dim=1)
    return y, after


def _convolved(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: bool,
) -> Tensor:
    """The sum over the k taps, activated and rounded."""
    if takes_plain_operations():
        return _in_torch(x, state, weight, bias, activation)
    return _Convolution.apply(x, state, weight, bias, activation)


def _in_torch(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool
) -> Tensor:
    y, _ = _sum(x, state, weight, bias)
    return (F.silu(y) if activation else y).to(x.dtype)


def _sum(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum over the k taps, and its inputs with the state in front, float32 or wider."""
    time = x.shape[1]
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    padded = torch.cat([state.to(x.dtype), x], dim=1).to(wide)
    # Contiguous rows, because strided ones prevent vectorised products.
    taps = weight.t().to(wide).contiguous().unbind()
    first = padded[:, :time]
    y = first * taps[0] if bias is None else torch.addcmul(bias.to(wide), first, taps[0])
    for j, tap in enumerate(taps[1:], start=1):
        y = y.addcmul_(padded[:, j : j + time], tap)
    return y, padded


def _at_starts(
    y: Tensor, padded: Tensor, weight: Tensor, bias: Tensor | None, rows: PackedRows
) -> Tensor:
    """`y` with the tokens near the start of a document computed from their own document only.

    These are k − 1 tokens per document, so that the cost is in proportion to the documents.
    """
    reach = weight.shape[1] - 1
    if not rows.has_starts or reach == 0:
        return y
    row, time, own = rows.near_start(reach)
    window = torch.arange(reach + 1, device=row.device)
    index = (row * padded.shape[1] + time)[:, None] + window
    inputs = padded.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)
    # Never a product with 0: what the other document left may be NaN.
    inputs = inputs.masked_fill((reach - window > own[:, None])[..., None], 0)
    wide = torch.promote_types(y.dtype, torch.float32)
    sums = (inputs.to(wide) * weight.t().to(wide)).sum(1)
    if bias is not None:
        sums = sums + bias.to(wide)
    return y.index_put_((row, time), sums.to(y.dtype))


def _last_inputs(padded: Tensor, reach: int, rows: PackedRows) -> Tensor:
    """The last `reach` inputs of each row's last document, `(b, reach, c)`; 0 before its start."""
    index = rows.count[:, None] + torch.arange(reach, device=padded.device)
    last = padded.gather(1, index[..., None].expand(-1, -1, padded.shape[2]))
    since = rows.since_start.gather(1, (rows.count - 1).clamp(min=0)[:, None])
    # A row without tokens keeps its state, though a document begins at none of its tokens.
    earlier = torch.arange(reach - 1, -1, -1, device=padded.device) > since
    return last.masked_fill(earlier[..., None], 0)


class _Convolution(torch.autograd.Function):
    """`_sum`, activated and rounded. Its backward pass adds the gradients of all taps into one
    tensor; autograd would create a tensor of zeros for every tap and take twice the time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        state: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, state, weight, bias)
        ctx.activation = activation
        y, _ = _sum(x, state, weight, bias)
        return (F.silu(y, inplace=True) if activation else y).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, state, weight, bias = tensors = ctx.saved_tensors
        wants = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():

            def run(*tensors: Tensor) -> Tensor:
                return _in_torch(*tensors, activation=ctx.activation)

            return *gradients_of(run, tensors, wants, (grad_y,)), None
        y, padded = _sum(x, state, weight, bias)
        time, before = x.shape[1], state.shape[1]
        grad_y = grad_y.to(y.dtype)
        if ctx.activation:
            grad_y = torch.ops.aten.silu_backward(grad_y, y)
        grad_x = grad_state = grad_weight = grad_bias = None
        if wants[0] or wants[1]:
            grad_padded = torch.zeros_like(padded)
            for j, tap in enumerate(weight.t().to(y.dtype).contiguous().unbind()):
                grad_padded[:, j : j + time].addcmul_(grad_y, tap)
            grad_state = grad_padded[:, :before].to(state.dtype)
            grad_x = grad_padded[:, before:].to(x.dtype)
        if wants[2]:
            windows = (padded[:, j : j + time] for j in range(weight.shape[1]))
            sums = [torch.mul(grad_y, window, out=y).sum((0, 1)) for window in windows]
            grad_weight = torch.stack(sums, dim=1).to(weight.dtype)
        if bias is not None and wants[3]:
            grad_bias = grad_y.sum((0, 1)).to(bias.dtype)
        return grad_x, grad_state, grad_weight, grad_bias, None
