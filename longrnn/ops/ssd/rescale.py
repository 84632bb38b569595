"""The recurrence with a limit on the norm of its state, in chunks.

    ĥ_t = a_t h_{t−1} + u_t,  u_t = x_t B_t^T,  h_t = s_t ĥ_t,  s_t = min(1, p / ‖ĥ_t‖)

Each s_t is one number per head and token. Once all of them are known this is the plain recurrence
with a'_t = s_t a_t and u'_t = s_t u_t, which any `SSD` computes. To know them, no state has to be
formed: within a chunk h_t = Σ_i w_{t,i} u_i, where u_0 is the state at the chunk's start, so that
norms are quadratic forms in the Gram matrix ⟨u_i, u_j⟩ = ⟨x_i, x_j⟩ ⟨B_i, B_j⟩. What remains
sequential are a few numbers per head and token.

Notable choices:
- Where the triangle inequality shows that no state of a segment can reach its limit, the segment
  goes to the plain recurrence as it is; the same is asked again of each chunk, and of each chunk's
  exact norms.
- Norms are summed in float64, from a Gram matrix in the state's dtype, and start anew from the
  state itself in every chunk: rounding does not add up along the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.ops.ssd import chunked
from longrnn.ops.ssd.base import SSD, ScanInputs

CHUNK = 64
SEGMENT = 512
UNLIMITED = 1e150  # a limit that no state reaches, and whose square is finite


def rescaled_ssd(
    inputs: ScanInputs, state: Tensor, limit: Tensor, ssd: SSD
) -> tuple[Tensor, Tensor]:
    """Runs the limited recurrence.

    Args:
        inputs: see `ScanInputs`.
        state: `(b, h, p, n)`, float32 or float64. A state above its limit is rescaled with the
            first token.
        limit: p of each head, `(h,)` float64, at most `UNLIMITED`.
        ssd: the plain recurrence.

    Returns:
        y `(b, t, h, p)` and the final state.
    """
    outputs = []
    for start in range(0, inputs.x.shape[1], SEGMENT):
        segment = ScanInputs(*(tensor[:, start : start + SEGMENT] for tensor in inputs))
        bounds = _bounds(segment, state)
        if bool((bounds <= limit).all()):
            y, state = ssd(segment, state)
            outputs.append(y)
            continue
        for first in range(0, segment.x.shape[1], CHUNK):
            chunk = ScanInputs(*(tensor[:, first : first + CHUNK] for tensor in segment))
            if bool((bounds[:, first : first + CHUNK] > limit).any()):
                chunk = _limited(chunk, state, limit)
            y, state = ssd(chunk, state)
            outputs.append(y)
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), state


def scale_to(limit: Tensor, square: Tensor) -> Tensor:
    """min(1, limit / √square): exactly 1, with gradient 0, where the norm is within its limit."""
    return limit / square.clamp(min=limit.square()).sqrt()


@torch.no_grad()
def _bounds(inputs: ScanInputs, state: Tensor) -> Tensor:
    """An upper bound of ‖ĥ_t‖ at every token, `(b, t, h)`: the recurrence of the norms alone."""
    heads_per_group = inputs.x.shape[2] // inputs.B.shape[2]
    norm_B = inputs.B.to(state.dtype).norm(dim=-1).repeat_interleave(heads_per_group, dim=2)
    norms = inputs.x.to(state.dtype).norm(dim=-1) * norm_B
    one = norms.new_ones(*norms.shape[:2], 1, 1)
    start = state.flatten(2).norm(dim=-1)[..., None, None]
    bounds, _ = chunked.ssd(ScanInputs(norms[..., None], inputs.log_decay, one, one), start)
    return bounds[..., 0] * (1 + 1e-4)  # more than its rounding


def _limited(inputs: ScanInputs, state: Tensor, limit: Tensor) -> ScanInputs:
    """The inputs of one chunk with its scales multiplied in."""
    gram = _gram(inputs, state)
    log_decay = inputs.log_decay.double()
    with torch.no_grad():
        within = bool((_plain_squares(gram, log_decay) <= limit.square()).all())
    if within:
        return inputs
    scales = _scales(gram, log_decay, limit)
    return inputs._replace(
        x=inputs.x * scales[..., None].to(inputs.x),
        log_decay=inputs.log_decay + scales.log().to(inputs.log_decay),
    )


def _gram(inputs: ScanInputs, state: Tensor) -> Tensor:
    """Inner products of the chunk's inputs, the state at its start as number 0.

    Returns:
        `(b, h, 1 + t, 1 + t)` float64.
    """
    x = inputs.x.to(state.dtype).transpose(1, 2)  # b h t p
    B = inputs.B.to(state.dtype).transpose(1, 2)  # b g t n
    heads_per_group = x.shape[1] // B.shape[1]
    products = (B @ B.transpose(2, 3)).repeat_interleave(heads_per_group, dim=1)
    among = (x @ x.transpose(2, 3)).mul(products)
    grouped = state.unflatten(1, (B.shape[1], heads_per_group))  # b g r p n
    read = grouped @ B.transpose(2, 3)[:, :, None]  # b g r p t
    with_start = (read.flatten(1, 2) * x.transpose(2, 3)).sum(2)  # b h t
    start = state.double().square().sum((2, 3))[..., None, None]
    top = torch.cat([start, with_start[:, :, None].double()], dim=3)
    rest = torch.cat([with_start[..., None], among], dim=3).double()
    return torch.cat([top, rest], dim=2)


def _plain_squares(gram: Tensor, log_decay: Tensor) -> Tensor:
    """‖h_t‖² if nothing is rescaled, `(b, t, h)`."""
    total = torch.nn.functional.pad(log_decay.transpose(1, 2).cumsum(2), (1, 0))  # b h 1+t
    between = (total[..., 1:, None] - total[..., None, :]).clamp(-1e4, 0)
    weights = between.exp().tril(diagonal=1)  # b h t 1+t
    return ((weights @ gram) * weights).sum(3).transpose(1, 2)


def _scales(gram: Tensor, log_decay: Tensor, limit: Tensor) -> Tensor:
    """s_t of one chunk, `(b, t, h)` float64: the only loop over tokens, on numbers."""
    columns = gram[:, :, 1:].unbind(2)  # symmetric: row t holds the products with u_t
    own = gram.diagonal(dim1=2, dim2=3)[..., 1:].unbind(2)
    decays = log_decay.exp().unbind(1)  # b h
    unit = torch.eye(gram.shape[2], dtype=gram.dtype, device=gram.device)
    weights = unit[0].expand(gram.shape[:3]).contiguous()
    square = gram[..., 0, 0]
    scales = []
    for t, (column, itself, decay) in enumerate(zip(columns, own, decays, strict=True), start=1):
        cross = (weights * column).sum(-1)
        square = decay * (decay * square + 2 * cross) + itself
        scale = scale_to(limit, square)
        square = scale.square() * square
        weights = weights * (scale * decay)[..., None] + scale[..., None] * unit[t]
        scales.append(scale)
    return torch.stack(scales, dim=1)
