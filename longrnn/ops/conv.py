"""Causal depthwise convolution over time, with an explicit state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor
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

    Returns:
        `y` of shape `(b, t, c)`, in the wider dtype of `x` and `weight`, and the state after the
        last token, in the dtype of `state`.
    """
    padded = torch.cat([state.to(x.dtype), x], dim=1)
    y = _Convolution.apply(padded, weight, bias)
    # The copy frees the segment, which a slice would keep in memory.
    return y, padded[:, x.shape[1] :].to(state.dtype, copy=True)


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
