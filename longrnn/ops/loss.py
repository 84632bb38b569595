"""Cross-entropy over a large vocabulary without a tensor of all logits.

Notable choices:
- Tokens are processed in pieces. The forward pass computes the loss, the most likely ids and the
  gradients of a piece from its logits and then drops the logits. Nothing is computed twice, because
  the weight of each token's loss is known beforehand. Only the gradients are kept for the backward
  pass; they are as large as the hidden states and the head.
- MAX_PIECE_LOGITS was chosen by measurement on a CPU. With a small vocabulary one piece
  suffices. Other devices take larger pieces, as a product of 166 rows leaves most of a GPU idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrnn.errors import UserError
from longrnn.ops.linear import matmul_nt
from longrnn.ops.precision import product_dtype, without_autocast
from longrnn.ops.transforms import in_forward_mode

# Logits of one piece, over all its tokens, on a CPU and on other devices.
MAX_PIECE_LOGITS = 2**23
MAX_DEVICE_LOGITS = 2**27
# Rows of the head's gradient that are computed at a time.
PRODUCT_ROWS = 8192


class HeadLoss(NamedTuple):
    """`loss`: scalar, float32 or wider; `predictions`: `(…,)` int64, the most likely ids."""

    loss: Tensor
    predictions: Tensor


def weighted_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    soft_cap: float | None = None,
) -> HeadLoss:
    """Σ weights · (−log softmax(hidden headᵀ)[targets]), and the argmax of the logits.

    Under autocast the factors of the products are rounded to its dtype. The logits are float32 or
    wider, because rounding a logit near 20 to 8 bits changes the loss in steps of 0.1. A token of
    weight 0 adds nothing to the loss and the gradients, even if its hidden vector is not finite.
    The loss is differentiable once, with respect to `hidden` and `head`, by a backward pass.

    Args:
        hidden: `(…, d)`.
        head: `(v, d)`.
        targets: `(…,)` int64; negative where a token is not scored.
        weights: `(…,)`, one per token; they get no gradient.
        soft_cap: logits are soft_cap · tanh(product / soft_cap); None for the products.

    Raises:
        UserError: in forward-mode differentiation.
    """
    if in_forward_mode():
        raise UserError(
            "this loss has no forward-mode derivative: use torch.nn.functional.cross_entropy with "
            "the logits of the model"
        )
    weights = weights.detach() * (targets >= 0)
    rows, dtype = _rows(hidden, head), product_dtype(hidden)
    loss, predictions = _HeadLoss.apply(
        hidden.flatten(0, -2), head, targets.flatten(), weights.flatten(), rows, dtype, soft_cap
    )
    return HeadLoss(loss, predictions.view_as(targets))


@torch.no_grad()
def token_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each token without a tensor of all logits, and without gradients.

    Logits are float32 or wider, as in `weighted_cross_entropy`.

    Args:
        hidden: `(…, d)`.
        head: `(v, d)`.
        targets: `(…,)` int64; the loss is 0 where they are negative.
        soft_cap: see `weighted_cross_entropy`.

    Returns:
        −log softmax(hidden headᵀ)[targets] in nats, and the most likely ids, both `(…,)`.
    """
    rows, dtype = _rows(hidden, head), product_dtype(hidden)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    pairs = zip(hidden.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True)
    losses = [hidden.new_empty(0, dtype=wide)]
    predictions = [targets.new_empty(0)]
    with without_autocast(hidden):
        logits_of = _logits_in(wide, head.to(dtype))
        for x, target in pairs:
            logits = _capped(logits_of(x.to(dtype)), soft_cap)
            result = _losses(logits, target.clamp(min=0), None)
            losses.append(result.losses.masked_fill(target < 0, 0))
            predictions.append(result.predictions)
    return torch.cat(losses).view_as(targets), torch.cat(predictions).view_as(targets)


def _rows(hidden: Tensor, head: Tensor) -> int:
    """Tokens of one piece."""
    most = MAX_PIECE_LOGITS if hidden.device.type == "cpu" else MAX_DEVICE_LOGITS
    return max(1, most // len(head))


def _capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    return logits if soft_cap is None else soft_cap * (logits / soft_cap).tanh()


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


class _RowLosses(NamedTuple):
    """Losses of rows of logits.

    Attributes:
        losses: `(rows,)`.
        predictions: `(rows,)` int64.
        gradient: `(rows, v)`, softmax − one-hot: of each loss with respect to its logits.
    """

    losses: Tensor
    predictions: Tensor
    gradient: Tensor | None


def _losses(logits: Tensor, targets: Tensor, dtype: torch.dtype | None) -> _RowLosses:
    """The losses of rows of logits.

    Args:
        logits: `(rows, v)`, which may be overwritten.
        targets: `(rows,)` int64, at least 0.
        dtype: of the gradient; None for no gradient.
    """
    index = targets[:, None]
    largest, most_likely = logits.max(-1, keepdim=True)
    target_logits = logits.gather(1, index)
    probabilities = logits.softmax(-1)
    # −log of the largest probability, which is never small, and the distance to it.
    losses = (largest - target_logits) - probabilities.gather(1, most_likely).log()
    loss, prediction = losses[:, 0], most_likely[:, 0]
    if dtype is None:
        return _RowLosses(loss, prediction, None)
    probabilities.scatter_add_(1, index, torch.full_like(target_logits, -1.0))
    return _RowLosses(loss, prediction, probabilities.to(dtype))


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
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow = head.to(dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        # The weight of one token among many may underflow float16: scale the largest weight to 1.
        weights = weights.to(wide)
        scale = weights.abs().amax() if len(weights) else weights.sum()
        relative = weights / scale.clamp(min=torch.finfo(wide).tiny)
        trained = None if grad_hidden is None and grad_head is None else dtype
        loss = hidden.new_zeros((), dtype=wide)
        predictions = torch.empty_like(targets)
        with without_autocast(hidden):
            logits_of = _logits_in(wide, narrow)
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                x, weight = hidden[part].to(dtype), relative[part, None]
                broken = (weight == 0) & ~x.isfinite().all(-1, keepdim=True)
                x = x.masked_fill(broken, 0)  # 0 · NaN would be NaN
                logits = _capped(logits_of(x), soft_cap)
                slope = None if soft_cap is None else 1 - (logits / soft_cap).square()
                result = _losses(logits, targets[part].clamp(min=0), trained)
                predictions[part] = result.predictions
                loss += (result.losses * weight[:, 0]).sum()
                gradient = result.gradient
                if gradient is None:
                    continue
                if slope is not None:
                    gradient = gradient * slope.to(gradient.dtype)
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
            None,
        )
