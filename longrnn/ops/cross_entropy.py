"""Cross-entropy over a large vocabulary without a tensor of all logits.

Notable choices:
- Tokens are processed in pieces. The forward pass computes the loss, the most likely ids and the
  gradients of a piece from its logits and then drops the logits. Nothing is computed twice, because
  the weight of each token's loss is known beforehand. Only the gradients are kept for the backward
  pass; they are as large as the hidden states and the head.
- MAX_LOGITS was chosen with `benchmarks/head_cpu.py`. With a small vocabulary one piece suffices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrnn.ops.linear import matmul_nt

# Logits of one piece, over all its tokens.
MAX_LOGITS = 2**23
# Rows of the head's gradient that are computed at a time.
PRODUCT_ROWS = 8192


class HeadLoss(NamedTuple):
    """`loss`: scalar, float32 or wider; `predictions`: `(…,)` int64, the most likely ids."""

    loss: Tensor
    predictions: Tensor


def weighted_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, *, max_logits: int = MAX_LOGITS
) -> HeadLoss:
    """Σ weights · (−log softmax(hidden headᵀ)[targets]), and the argmax of the logits.

    Under autocast the factors of the products are rounded to its dtype. The logits are float32 or
    wider, because rounding a logit near 20 to 8 bits changes the loss in steps of 0.1. A token of
    weight 0 adds nothing to the loss and the gradients, even if its hidden vector is not finite.
    The loss is differentiable once, with respect to `hidden` and `head`.

    Args:
        hidden: `(…, d)`.
        head: `(v, d)`.
        targets: `(…,)` int64; negative where a token is not scored.
        weights: `(…,)`, one per token; they get no gradient.
        max_logits: how many logits may exist at a time.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    weights = weights.detach() * (targets >= 0)
    rows = max(1, max_logits // len(head))
    loss, predictions = _HeadLoss.apply(
        hidden.flatten(0, -2), head, targets.flatten(), weights.flatten(), rows, dtype
    )
    return HeadLoss(loss, predictions.view_as(targets))


def _logits_in(dtype: torch.dtype, head: Tensor) -> Callable[[Tensor], Tensor]:
    """The function x ↦ x headᵀ in `dtype`, which is wide enough that no product is rounded."""
    if head.is_cuda and head.dtype != dtype == torch.float32 and torch.__version__ >= "2.8":
        return lambda x: torch.mm(x, head.t(), out_dtype=dtype)
    wide = head.to(dtype)
    return lambda x: matmul_nt(x.to(dtype), wide)


def _add_products(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Adds gradientᵀ x to `total`, some rows at a time, so that the product needs little memory."""
    for start in range(0, len(total), PRODUCT_ROWS):
        part = slice(start, start + PRODUCT_ROWS)
        total[part] += matmul_nt(gradient[:, part].t(), x.t())


class _HeadLoss(torch.autograd.Function):
    """`weighted_cross_entropy` of `(t, d)` in pieces of `rows` tokens, with factors in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        rows: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow = head.to(dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        # The weight of one token among many may underflow float16: scale the largest weight to 1.
        weights = weights.to(wide)
        scale = weights.abs().amax() if len(weights) else weights.sum()
        relative = weights / scale.clamp(min=torch.finfo(wide).tiny)
        loss = hidden.new_zeros((), dtype=wide)
        predictions = torch.empty_like(targets)
        with torch.autocast(hidden.device.type, enabled=False):
            logits_of = _logits_in(wide, narrow)
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                x, weight = hidden[part].to(dtype), relative[part, None]
                broken = (weight == 0) & ~x.isfinite().all(-1, keepdim=True)
                x = x.masked_fill(broken, 0)  # 0 · NaN would be NaN
                logits = logits_of(x)
                largest, most_likely = logits.max(-1, keepdim=True)
                predictions[part] = most_likely[:, 0]
                index = targets[part, None].clamp(min=0)
                target_logits = logits.gather(1, index)
                gradient = logits.softmax(-1)
                # log Σ exp(logits) from the largest probability, which is never small.
                normaliser = largest - gradient.gather(1, most_likely).log()
                loss += ((normaliser - target_logits) * weight).sum()
                if grad_hidden is None and grad_head is None:
                    continue
                # In place: softmax − one-hot, the gradient of a token's loss w.r.t. its logits.
                gradient.scatter_add_(1, index, torch.full_like(target_logits, -1.0))
                gradient = gradient.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = matmul_nt(gradient, narrow.t()).to(wide) * weight * scale
                weighted = (x * weight).to(dtype)
                if grad_head is not None:
                    _add_products(grad_head, gradient, weighted)
        if grad_head is not None:
            grad_head = grad_head.mul_(scale).to(head.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(predictions)
        return loss * scale, predictions

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad_loss: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype),
            None if grad_head is None else grad_head * grad_loss.to(grad_head.dtype),
            None,
            None,
            None,
            None,
        )
