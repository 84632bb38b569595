"""Cross-entropy over a large vocabulary without the tensor of all logits.

Notable choices:
- Tokens are taken in pieces. A piece's logits become its loss, its likeliest ids and its gradients
  at once and are then dropped: nothing is computed twice, because the weight of each token's loss
  is known beforehand. What stays for the backward pass is the gradient itself, as large as hidden
  states and head and not as the logits.
- PIECE was chosen by `benchmarks/head_cpu.py`. A small vocabulary is one piece of the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one piece.
PIECE = 2**23


class HeadLoss(NamedTuple):
    """`loss`: scalar, float32 at least; `predictions`: `(…,)` int64, the likeliest ids."""

    loss: Tensor
    predictions: Tensor


def weighted_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, *, piece: int = PIECE
) -> HeadLoss:
    """Σ weights · (−log softmax(hidden headᵀ)[targets]), and the argmax of the logits.

    The factors of the products are rounded to the dtype of autocast where it is on. The logits are
    not: they are float32 at least, because 8 bits of a logit near 20 are steps of 0.1 in the loss.
    A token of weight 0 adds nothing to loss and gradients, also where its hidden vector is not
    finite. The loss is differentiable once, in `hidden` and `head`.

    Args:
        hidden: `(…, d)`.
        head: `(v, d)`.
        targets: `(…,)` int64; below 0 where unscored.
        weights: `(…,)`, of each token's loss; no gradient flows into them.
        piece: how many logits exist at a time.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    weights = weights.detach() * (targets >= 0)
    rows = max(1, piece // len(head))
    loss, predictions = _HeadLoss.apply(
        hidden.flatten(0, -2), head, targets.flatten(), weights.flatten(), rows, dtype
    )
    return HeadLoss(loss, predictions.view_as(targets))


def _logits_in(dtype: torch.dtype, head: Tensor) -> Callable[[Tensor], Tensor]:
    """x ↦ x headᵀ in `dtype`, at least as wide as the factors, so that no product is rounded."""
    if head.is_cuda and head.dtype != dtype == torch.float32 and torch.__version__ >= "2.8":
        return lambda x: torch.mm(x, head.t(), out_dtype=dtype)
    wide = head.to(dtype)
    return lambda x: x.to(dtype) @ wide.t()


class _HeadLoss(torch.autograd.Function):
    """`weighted_cross_entropy` of `(t, d)`, in pieces of `rows` tokens, products in `dtype`."""

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
        # float16 has no numbers for weights as small as one token's among many: the largest
        # becomes 1 in the products.
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
                largest, likeliest = logits.max(-1, keepdim=True)
                predictions[part] = likeliest[:, 0]
                place = targets[part, None].clamp(min=0)
                said = logits.gather(1, place)
                gradient = logits.softmax(-1)
                # The largest probability is 1 / Σ exp(logit − largest), and never small.
                normaliser = largest - gradient.gather(1, likeliest).log()
                loss += ((normaliser - said) * weight).sum()
                if grad_hidden is None and grad_head is None:
                    continue
                # In place: softmax − one-hot, the gradient of a token's loss in its logits.
                gradient.scatter_add_(1, place, torch.full_like(said, -1.0))
                gradient = gradient.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (gradient @ narrow).to(wide) * weight * scale
                weighted = (x * weight).to(dtype)
                if grad_head is not None and dtype == wide:
                    grad_head.addmm_(gradient.t(), weighted)  # without a second tensor of its size
                elif grad_head is not None:
                    grad_head += gradient.t() @ weighted
        if grad_head is not None:
            grad_head = grad_head.mul_(scale).to(head.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(predictions)
        return loss * scale, predictions

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, of_loss: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * of_loss.to(grad_hidden.dtype),
            None if grad_head is None else grad_head * of_loss.to(grad_head.dtype),
            None,
            None,
            None,
            None,
        )
