"""Cross-entropy over a large vocabulary without a tensor of all logits.

Notable choices:
- Tokens are processed in pieces. The forward pass computes the loss, the most likely ids and the
  gradients of a piece from its logits and then drops the logits. Nothing is computed twice, because
  the weight of each token's loss is known beforehand. Only the gradients are kept for the backward
  pass; they are as large as the hidden states and the head.
- MAX_PIECE_LOGITS was chosen by measurement on a CPU. With a small vocabulary one piece
  suffices. Other devices take larger pieces, as a product of 166 rows leaves most of a GPU idle.
- `torch.nn.functional.linear_cross_entropy` has no soft cap and returns no ids, and with a weight
  for each token it computes the logits a second time.
"""

from collections.abc import Iterator
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
    rows, ids = hidden.flatten(0, -2), targets.flatten()
    predictions = torch.empty_like(ids)
    is_trained = torch.is_grad_enabled()
    grad_rows = torch.empty_like(rows) if is_trained and hidden.requires_grad else None
    wide, narrow_head = _wide(hidden), head.detach().to(product_dtype(hidden))
    trains_head = is_trained and head.requires_grad
    grad_head = torch.zeros_like(head, dtype=wide) if trains_head else None
    with torch.no_grad(), without_autocast(hidden):
        loss = rows.new_zeros((), dtype=wide)
        # The weight of one token among many may underflow float16: scale the largest weight to 1.
        weights = (weights * (targets >= 0)).flatten().to(wide)
        scale = weights.abs().amax() if len(weights) else weights.sum()
        weights = (weights / scale.clamp(min=torch.finfo(wide).tiny))[:, None]
        # Vectors that are not finite, because 0 · NaN would be NaN.
        broken = (weights == 0) & ~rows.isfinite().all(-1, keepdim=True)
        for part, x, logits in _pieces(rows.masked_fill(broken, 0), narrow_head, soft_cap):
            losses, predictions[part], gradient = _losses(logits, ids[part])
            loss += (losses * weights[part, 0]).sum()
            if grad_rows is None and grad_head is None:
                continue
            index = ids[part, None].clamp(min=0)
            gradient.scatter_add_(1, index, torch.full_like(weights[part], -1.0))
            if soft_cap is not None:
                gradient *= 1 - (logits / soft_cap).square()
            gradient = gradient.to(x.dtype)
            if grad_rows is not None:
                product = matmul_nt(gradient, narrow_head.t()).to(wide)
                grad_rows[part] = product * weights[part] * scale
            if grad_head is not None:
                _add_products(grad_head, gradient, (x * weights[part]).to(x.dtype))
        if grad_head is not None:
            grad_head = grad_head.mul_(scale).to(head.dtype)
    loss = _WithGradients.apply(loss * scale, rows, head, grad_rows, grad_head)
    return HeadLoss(loss, predictions.view_as(targets))


@torch.no_grad()
def token_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, *, soft_cap: float | None = None
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
    ids, narrow_head = targets.flatten(), head.to(product_dtype(hidden))
    losses, predictions = ids.new_empty(len(ids), dtype=_wide(hidden)), torch.empty_like(ids)
    with without_autocast(hidden):
        for part, _, logits in _pieces(hidden.flatten(0, -2), narrow_head, soft_cap):
            losses[part], predictions[part], _ = _losses(logits, ids[part])
    return losses.masked_fill(ids < 0, 0).view_as(targets), predictions.view_as(targets)


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _pieces(
    rows: Tensor, head: Tensor, soft_cap: float | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each piece its slice of `rows`, these in the dtype of `head`, and their logits.

    The logits are float32 or wider, so that no product is rounded.
    """
    wide, most = _wide(rows), MAX_PIECE_LOGITS if rows.device.type == "cpu" else MAX_DEVICE_LOGITS
    size = max(1, most // len(head))
    mixed = head.is_cuda and head.dtype != wide == torch.float32 and torch.__version__ >= "2.8"
    wide_head = head if mixed else head.to(wide)
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        x = rows[part].to(head.dtype)
        if mixed:
            logits = torch.mm(x, head.t(), out_dtype=wide)
        else:
            logits = matmul_nt(x.to(wide), wide_head)
        if soft_cap is not None:
            logits = soft_cap * (logits / soft_cap).tanh()
        yield part, x, logits


def _add_products(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Adds gradientᵀ x to `total`, some rows at a time, so that the product needs little memory."""
    for start in range(0, len(total), PRODUCT_ROWS):
        part = slice(start, start + PRODUCT_ROWS)
        total[part] += matmul_nt(gradient[:, part].t(), x.t())


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of rows of logits, the most likely ids and the probabilities `(rows, v)`.

    Args:
        logits: `(rows, v)`.
        targets: `(rows,)` int64; where they are negative, the loss has no meaning.
    """
    largest, most_likely = logits.max(-1, keepdim=True)
    probabilities = logits.softmax(-1)
    # −log of the largest probability, which is never small, and the distance to it.
    distance = largest - logits.gather(1, targets[:, None].clamp(min=0))
    losses = distance - probabilities.gather(1, most_likely).log()
    return losses[:, 0], most_likely[:, 0], probabilities


class _WithGradients(torch.autograd.Function):
    """A loss with its known gradients with respect to two tensors; None for a constant."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, hidden: Tensor, head: Tensor, *gradients: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = [
            None if gradient is None else gradient * grad_loss.to(gradient.dtype)
            for gradient in ctx.saved_tensors
        ]
        return None, *gradients, None, None
