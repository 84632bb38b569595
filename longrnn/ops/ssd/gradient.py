"""The gradient of one segment of the chunked recurrence, from its inputs and its first state.

With W_ij = (C_i · B_j) exp(Σ log_decay over (j, i]) inside a chunk, S the state at its start, and
D the gradient of the state at its end,

    dx_j = Σ_i W_ij dy_i + e_j D B_j,     dB_j = Σ_i (dW_ij ∘ decay) C_i + e_j x_j D,
    dC_i = Σ_j (dW_ij ∘ decay) B_j + s_i dy_i S,     D before the chunk = a D + Σ_i s_i dy_i C_i^T,

where e_j is the decay from j to the chunk's end, s_i that from its start to i, and a that of the
whole chunk. The gradient of a log decay is the sum over all these terms whose decay contains it.

Notable choices:
- Decays, scores and states at the starts of chunks are computed again: they would need more memory
  than all inputs, and computing them costs a sixth of the segment's matrix products.
- A term whose decay is 1 (j = i) is left out of the gradient of the log decays before summing. As
  the difference of two sums it would leave its rounding error to heads that forget at once.
- Sums of log decays' gradients are float64, as the decays are.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from longrnn.ops.linear import matmul_nt
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.decays import decay_between, exp_in_place, running_sums, split_decay


def segment_gradient(
    inputs: ScanInputs,
    state: Tensor,
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    chunk: int,
    *,
    wants_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, in the dtype of the state, and of log_decay, B, C and the state, in theirs.

    Args:
        inputs: of a segment of whole chunks.
        state: before the segment, `(b, h, p, n)`.
        grad_y: `(b, t, h, p)`; None for 0.
        grad_final: of the state after the segment; None for 0.
        chunk: tokens per chunk.
        wants_state: whether the gradient of the state is computed, None otherwise.
    """
    b, time, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    m, dtype = time // chunk, state.dtype
    if grad_y is None:
        grad_y = inputs.x.new_zeros(inputs.x.shape, dtype=dtype)
    x, grad_y = (part.to(dtype).unflatten(1, (m, chunk)) for part in (inputs.x, grad_y))
    B, C = (
        rearrange(part.to(dtype), "b (m j) g n -> b m g j n", m=m) for part in (inputs.B, inputs.C)
    )
    total = running_sums(inputs.log_decay, m)
    grad_x, grad_B, grad_C, grad_total = _within(x, B, C, total, grad_y)

    to_end = exp_in_place((total[:, :, -1:] - total).to(dtype))[..., None]  # b m j h 1
    since_start = exp_in_place(total.to(dtype, copy=True))[..., None]
    x_to_end = _by_group(x * to_end, g)  # b m g j (r p)
    y_from_start = _by_group(grad_y * since_start, g)
    parts = split_decay(total[:, :, -1, :, None], dtype)
    whole, rest = (part.expand(b, m, h, p).reshape(b, m, g, -1, 1) for part in parts)

    def advance(rows: Tensor, weighted: Tensor, other: Tensor, i: int) -> Tensor:
        """decay · rows + weightedᵀ other, as the forward pass computes a state."""
        added = (rest[:, i].flatten(0, 1) * rows).baddbmm_(
            weighted[:, i].flatten(0, 1).mT, other[:, i].flatten(0, 1)
        )
        return torch.addcmul(added, whole[:, i].flatten(0, 1), rows)

    starts = [state.reshape(b * g, -1, n)]  # of each chunk, (b g) (r p) n
    for i in range(m - 1):
        starts.append(advance(starts[-1], x_to_end, B, i))
    if grad_final is None:
        grad_final = torch.zeros_like(state)
    after = grad_final.reshape(b * g, -1, n).to(dtype)
    for i in range(m - 1, -1, -1):
        rows = starts.pop()
        x_i, y_i, B_i, C_i = (part[:, i].flatten(0, 1) for part in (x_to_end, y_from_start, B, C))
        from_end = _nt(B_i, after)  # (b g) j (r p)
        grad_B[:, i] += _nt(x_i, after.mT).view(b, g, chunk, n)
        grad_C[:, i] += _nt(y_i, rows.mT).view(b, g, chunk, n)
        ending = _per_head(x_i * from_end, b, p)  # b j h
        starting = _per_head(y_i * _nt(C_i, rows), b, p)
        heads = (b * h, -1)
        kept = after.reshape(*heads)[:, None] @ rows.reshape(*heads)[..., None]  # (b h) 1 1
        decay = total[:, i, -1].exp()
        grad_total[:, i] += starting - ending
        grad_total[:, i, -1] += ending.sum(1) + kept.view(b, h).double() * decay
        from_end = from_end.view(b, g, chunk, -1, p).transpose(1, 2).reshape(b, chunk, h, p)
        grad_x[:, i].addcmul_(from_end, to_end[:, i])
        if i or wants_state:
            after = advance(after, y_from_start, C, i)
    # The gradient of a log decay is the sum over all running sums that contain it.
    grad_log_decay = grad_total.flip(2).cumsum(2).flip(2).flatten(1, 2)
    return (
        grad_x.flatten(1, 2),
        grad_log_decay.to(inputs.log_decay.dtype),
        rearrange(grad_B, "b m g j n -> b (m j) g n").to(inputs.B.dtype),
        rearrange(grad_C, "b m g j n -> b (m j) g n").to(inputs.C.dtype),
        after.view(state.shape) if wants_state else None,
    )


def _within(
    x: Tensor, B: Tensor, C: Tensor, total: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of the gradient that stays within the chunks.

    Args:
        x: `(b, m, j, h, p)`.
        B: `(b, m, g, j, n)`.
        C: `(b, m, g, i, n)`.
        total: `(b, m, j, h)` float64.
        grad_y: `(b, m, i, h, p)`.

    Returns:
        Gradients of x, B, C, and of `total` in float64, all contiguous.
    """
    g = B.shape[2]
    x, grad_y = x.transpose(2, 3).contiguous(), grad_y.transpose(2, 3).contiguous()  # b m h j p
    scores = (C @ B.mT).tril()[:, :, :, None]  # b m g 1 i j
    decay = decay_between(total, x.dtype).unflatten(2, (g, -1))  # b m g r i j
    grad_x = ((scores * decay).flatten(2, 3).mT @ grad_y).transpose(2, 3).contiguous()
    weighted = (grad_y @ x.mT).unflatten(2, (g, -1)).mul_(decay)
    grad_scores = weighted.sum(3).tril_()
    terms = weighted.mul_(scores.tril(-1)).flatten(2, 3)  # b m h i j, 0 unless j < i
    grad_total = terms.sum(4).double() - terms.sum(3).double()
    return grad_x, grad_scores.mT @ C, grad_scores @ B, grad_total.transpose(2, 3).contiguous()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`(b, m, g, j, r p)` from `(b, m, j, h, p)`."""
    return rearrange(x, "b m j (g r) p -> b m g j (r p)", g=groups)


def _per_head(products: Tensor, rows: int, width: int) -> Tensor:
    """Sums over the channels of each head: `(b, j, h)` float64 from `(b g, j, r p)`."""
    sums = products.unflatten(2, (-1, width)).sum(3).double()
    return rearrange(sums, "(b g) j r -> b j (g r)", b=rows)


def _nt(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ for each pair of a batch, `(k, …, …)`."""
    return matmul_nt(a[0], b[0])[None] if len(a) == 1 else a @ b.mT
