# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
"""Loss, most likely id and gradient of rows of logits, in two passes over them.

torch's operators pass over the logits seven times: maximum, softmax (three), two selections, and
the cast of the gradient. They are the largest tensor of a training step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import on_device, readable

# Logits that a program holds at a time.
BLOCK = 4096


@triton.jit
def loss_rows(logits, targets, losses, likeliest, gradient, V,
              BLOCK: tl.constexpr, GRADIENT: tl.constexpr):  # fmt: skip
    """One row of logits. Grid: rows.

    Args:
        logits: `(rows, V)`, contiguous, float32 or float64.
        targets: `(rows,)` int64, at least 0.
        losses: `(rows,)`: −log softmax at the target.
        likeliest: `(rows,)` int64.
        gradient: GRADIENT: `(rows, V)`: softmax − one-hot; may be the same memory as the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    column = tl.arange(0, BLOCK)
    ACC: tl.constexpr = logits.dtype.element_ty
    largest = tl.full((BLOCK,), float("-inf"), ACC)
    total = tl.zeros((BLOCK,), ACC)
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        value = tl.load(start + first + column, mask=first + column < V, other=float("-inf"))
        higher = value > largest
        place = tl.where(higher, first + column, place)
        now = tl.where(higher, value, largest)
        # exp(−∞ − −∞) would be NaN in columns that have no entry yet.
        kept = tl.where(now == float("-inf"), 0.0, tl.exp(largest - now))
        new = tl.where(value == float("-inf"), 0.0, tl.exp(value - now))
        total = total * kept + new
        largest = now
    top = tl.max(largest, 0)
    # The first of several equal entries, as torch returns it on a CPU.
    tl.store(likeliest + row, tl.min(tl.where(largest == top, place, V), 0).to(tl.int64))
    share = tl.where(largest == float("-inf"), 0.0, tl.exp(largest - top))
    # A NaN is never larger, and so is found in the sums alone.
    whole = tl.sum(total * share, 0)
    target = tl.load(targets + row)
    tl.store(losses + row, (top - tl.load(start + target)) + tl.log(whole))
    if GRADIENT:
        for first in range(0, V, BLOCK):
            here = first + column < V
            value = tl.load(start + first + column, mask=here, other=float("-inf"))
            found = tl.exp(value - top) / whole - tl.where(first + column == target, 1.0, 0.0)
            at = gradient + row * V + first + column
            tl.store(at, found.to(gradient.dtype.element_ty), mask=here)


def losses(
    logits: Tensor, targets: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses, most likely ids and gradients of rows.

    Args:
        logits: `(rows, v)`, float32 or wider; overwritten by a gradient of the same dtype.
        targets: `(rows,)` int64, at least 0.
        dtype: of the gradient; None for no gradient.

    Returns:
        −log softmax at the target `(rows,)`, the most likely ids `(rows,)`, and softmax − one-hot
        `(rows, v)` or None.
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    found = torch.empty(rows, dtype=logits.dtype, device=logits.device)
    likeliest = torch.empty(rows, dtype=torch.long, device=logits.device)
    gradient = written = logits
    if dtype is not None and dtype != logits.dtype:
        gradient = torch.empty(logits.shape, dtype=dtype, device=logits.device)
        written = readable(gradient)
    with on_device(logits):
        loss_rows[(rows,)](
            logits, targets.contiguous(), found, likeliest, written, size,
            BLOCK=min(BLOCK, triton.next_power_of_2(size)), GRADIENT=dtype is not None, num_warps=8,
        )  # fmt: skip
    if written is not gradient:
        gradient.copy_(written)
    return found, likeliest, None if dtype is None else gradient
