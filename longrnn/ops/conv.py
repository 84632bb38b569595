"""Causal depthwise convolution over time, with an explicit state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.packed_rows import PackedRows


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: PackedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves each channel with its own filter over the current token and the k − 1 before it.

    y_t = Σ_j weight[:, j] · x_{t−k+1+j} (+ bias). For the usual k = 4, adding up the terms one by
    one is faster on a CPU than `conv1d`, in every dtype, and any split gives the same bits. The sum
    is computed in float32 or wider and rounded once.

    Args:
        x: `(b, t, c)`.
        weight: `(c, k)`; the last column is the weight of the current token.
        bias: `(c,)` or None.
        state: `(b, k − 1, c)`, the inputs that precede `x`.
        rows: where documents and padding begin; None for rows of one document without padding. No
            term comes from another document, and the state is that after the last token before
            the padding.

    Returns:
        `y` of shape `(b, t, c)`, in the wider dtype of `x` and `weight`, and the state after the
        last token, in the dtype of `state`.
    """
    padded = torch.cat([state.to(x.dtype), x], dim=1)
    y = _Convolution.apply(padded, weight, bias)
    if rows is not None:
        y = _at_starts(y, padded, weight, bias, rows)
        return y, _last_inputs(padded, weight.shape[1] - 1, rows).to(state.dtype)
    # The copy frees the segment, which a slice would keep in memory.
    return y, padded[:, x.shape[1] :].to(state.dtype, copy=True)


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
    """The sum over the k taps. Its backward pass, itself differentiable, adds into one gradient;
    autograd would create a tensor of zeros for every tap and take twice the time."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded, weight)
        ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
        time = padded.shape[1] - weight.shape[1] + 1
        result = torch.promote_types(padded.dtype, weight.dtype)
        wide = torch.promote_types(result, torch.float32)
        # Contiguous rows, because strided ones prevent vectorised products.
        taps = weight.t().to(wide).contiguous().unbind()
        first = padded[:, :time].to(wide)
        y = first * taps[0] if bias is None else torch.addcmul(bias.to(wide), first, taps[0])
        for j, tap in enumerate(taps[1:], start=1):
            y = y.addcmul_(padded[:, j : j + time].to(wide), tap)
        return y.to(result)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor
    ) -> tuple[Tensor | None, ...]:
        padded, weight = ctx.saved_tensors
        wants_padded, wants_weight, wants_bias = ctx.needs_input_grad
        wide = torch.promote_types(grad_y.dtype, torch.float32)
        grad_y, time = grad_y.to(wide), grad_y.shape[1]
        grad_padded = grad_weight = grad_bias = None
        if wants_padded:
            grad_padded = grad_y.new_zeros(padded.shape)
            for j, tap in enumerate(weight.t().to(wide).contiguous().unbind()):
                grad_padded[:, j : j + time].addcmul_(grad_y, tap)
            grad_padded = grad_padded.to(padded.dtype)
        if wants_weight:
            windows = (padded[:, j : j + time].to(wide) for j in range(weight.shape[1]))
            sums = [(grad_y * window).sum((0, 1)) for window in windows]
            grad_weight = torch.stack(sums, dim=1).to(weight.dtype)
        if wants_bias:
            grad_bias = grad_y.sum((0, 1)).to(ctx.bias_dtype)
        return grad_padded, grad_weight, grad_bias
