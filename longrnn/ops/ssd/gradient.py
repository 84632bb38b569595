"""The gradient of one segment of the chunked recurrence, from its inputs and its first state.

With u_j = gain_j x_j, W_ij = (C_i · B_j) exp(Σ log_decay over (j, i]) inside a chunk, S the state
at its start, and D the gradient of the state at its end,

    du_j = Σ_i W_ij dy_i + e_j D B_j,     dB_j = Σ_i (dW_ij ∘ decay) C_i + e_j u_j D,
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

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from longrnn.ops.linear import batched_nt
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.decays import decay_between, exp_in_place, running_sums, split_decay


class _Chunk(NamedTuple):
    """One chunk: inputs and gradients of outputs, decayed to its end or from its start.

    Attributes:
        u_to_end: `(b g, j, r p)`.
        y_from_start: `(b g, i, r p)`, the gradient of y.
        B: `(b g, j, n)`.
        C: `(b g, i, n)`.
        whole: `(b g, r p, 1)`, the first part of the chunk's decay.
        rest: the second part.
    """

    u_to_end: Tensor
    y_from_start: Tensor
    B: Tensor
    C: Tensor
    whole: Tensor
    rest: Tensor

    def advance(self, rows: Tensor, weighted: Tensor, other: Tensor) -> Tensor:
        """decay · rows + weightedᵀ other, as the forward pass computes a state."""
        added = (self.rest * rows).baddbmm_(weighted.mT, other)
        return torch.addcmul(added, self.whole, rows)


def segment_gradient(
    inputs: ScanInputs,
    state: Tensor,
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    chunk: int,
    *,
    wants_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, gain, log_decay, B, C and the state, in their dtypes.

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
    u = inputs.scaled_x(dtype).unflatten(1, (m, chunk))
    grad_y = grad_y.to(dtype).unflatten(1, (m, chunk))
    B, C = (
        rearrange(part.to(dtype), "b (m j) g n -> b m g j n", m=m) for part in (inputs.B, inputs.C)
    )
    total = running_sums(inputs.log_decay, m)
    grad_u, grad_B, grad_C, grad_total = _within(u, B, C, total, grad_y)

    to_end = exp_in_place((total[:, :, -1:] - total).to(dtype))[..., None]  # b m j h 1
    since_start = exp_in_place(total.to(dtype, copy=True))[..., None]
    u_to_end = _by_group(u * to_end, g)  # b m g j (r p)
    y_from_start = _by_group(grad_y * since_start, g)
    parts = split_decay(total[:, :, -1, :, None], dtype)
    whole, rest = (part.expand(b, m, h, p).reshape(b, m, g, -1, 1) for part in parts)

    parts = (part.unbind(1) for part in (u_to_end, y_from_start, B, C, whole, rest))
    chunks = [
        _Chunk(*(tensor.flatten(0, 1) for tensor in tensors))
        for tensors in zip(*parts, strict=True)
    ]
    starts = [state.reshape(b * g, -1, n)]  # of each chunk, (b g) (r p) n
    for one in chunks[:-1]:
        starts.append(one.advance(starts[-1], one.u_to_end, one.B))
    if grad_final is None:
        grad_final = torch.zeros_like(state)
    after = grad_final.reshape(b * g, -1, n).to(dtype)
    ending, starting, kept = [], [], []  # last chunk first
    views = (part.unbind(1) for part in (grad_u, grad_B, grad_C, to_end))
    for one, rows, (u_i, B_i, C_i, to_end_i) in zip(
        reversed(chunks), reversed(starts), reversed([*zip(*views, strict=True)]), strict=True
    ):
        from_end = batched_nt(one.B, after)  # (b g) j (r p)
        B_i += batched_nt(one.u_to_end, after.mT).view(b, g, chunk, n)
        C_i += batched_nt(one.y_from_start, rows.mT).view(b, g, chunk, n)
        kept.append((after * rows).view(b, h, -1).sum(2))
        per_head = from_end.view(b, g, chunk, -1, p).transpose(1, 2).reshape(b, chunk, h, p)
        u_i.addcmul_(per_head, to_end_i)
        ending.append(_per_head(from_end.mul_(one.u_to_end), b, p))  # b j h
        starting.append(_per_head(batched_nt(one.C, rows).mul_(one.y_from_start), b, p))
        if wants_state or one is not chunks[0]:
            after = one.advance(after, one.y_from_start, one.C)
    last, first, whole_sums = (
        torch.stack(found[::-1], dim=1).double() for found in (ending, starting, kept)
    )
    grad_total += first - last
    grad_total[:, :, -1] += last.sum(2) + whole_sums * total[:, :, -1].exp()
    # The gradient of a log decay is the sum over all running sums that contain it.
    grad_log_decay = grad_total.flip(2).cumsum(2).flip(2).flatten(1, 2)
    grad_u = grad_u.flatten(1, 2)
    return (
        (grad_u * inputs.gain[..., None].to(dtype)).to(inputs.x.dtype),
        (grad_u * inputs.x).sum(3).to(inputs.gain.dtype),
        grad_log_decay.to(inputs.log_decay.dtype),
        rearrange(grad_B, "b m g j n -> b (m j) g n").to(inputs.B.dtype),
        rearrange(grad_C, "b m g j n -> b (m j) g n").to(inputs.C.dtype),
        after.view(state.shape) if wants_state else None,
    )


def _within(
    u: Tensor, B: Tensor, C: Tensor, total: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of the gradient that stays within the chunks.

    Args:
        u: `(b, m, j, h, p)`, gain · x.
        B: `(b, m, g, j, n)`.
        C: `(b, m, g, i, n)`.
        total: `(b, m, j, h)` float64.
        grad_y: `(b, m, i, h, p)`.

    Returns:
        Gradients of u, B, C, and of `total` in float64, all contiguous.
    """
    g = B.shape[2]
    u, grad_y = u.transpose(2, 3).contiguous(), grad_y.transpose(2, 3).contiguous()  # b m h j p
    scores = (C @ B.mT).tril()[:, :, :, None]  # b m g 1 i j
    decay = decay_between(total, u.dtype).unflatten(2, (g, -1))  # b m g r i j
    grad_u = ((scores * decay).flatten(2, 3).mT @ grad_y).transpose(2, 3).contiguous()
    weighted = (grad_y @ u.mT).unflatten(2, (g, -1)).mul_(decay)
    grad_scores = weighted.sum(3).tril_()
    terms = weighted.mul_(scores.tril(-1)).flatten(2, 3)  # b m h i j, 0 unless j < i
    grad_total = terms.sum(4).double() - terms.sum(3).double()
    return grad_u, grad_scores.mT @ C, grad_scores @ B, grad_total.transpose(2, 3).contiguous()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`(b, m, g, j, r p)` from `(b, m, j, h, p)`."""
    return rearrange(x, "b m j (g r) p -> b m g j (r p)", g=groups)


def _per_head(products: Tensor, rows: int, width: int) -> Tensor:
    """Sums over the channels of each head: `(b, j, h)` from `(b g, j, r p)`."""
    sums = products.unflatten(2, (-1, width)).sum(3)
    return rearrange(sums, "(b g) j r -> b j (g r)", b=rows)
