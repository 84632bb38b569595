"""The recurrence with a limit on the norm of its state, in chunks.

    ĥ_t = a_t h_{t−1} + u_t,  u_t = gain_t x_t B_t^T,  h_t = s_t ĥ_t,  s_t = min(1, limit / ‖ĥ_t‖)

The scale s_t is one number per head and token. Given all scales, this is the plain recurrence with
a'_t = s_t a_t and u'_t = s_t u_t, which any `SSD` computes. Computing the scales needs no state:
within a chunk h_t = Σ_i w_{t,i} u_i, where u_0 is the state at the chunk's start, so norms are
quadratic forms in the Gram matrix ⟨u_i, u_j⟩ = gain_i gain_j ⟨x_i, x_j⟩ ⟨B_i, B_j⟩. Only a few
operations on one number per head remain sequential.

Notable choices:
- If the triangle inequality shows that no state of a segment can reach its limit, the plain
  recurrence computes the segment. If it does not, and no state is at its limit yet, the norms of
  the plain recurrence are computed: ⟨ĥ_t, u_t⟩ = x_t^T ĥ_t B_t is the output of the recurrence with
  B in place of C. Tokens before the first one that exceeds its limit need no rescaling.
- The sequential part works on products of the scales, so that a token costs a few operations on
  one number per head. A chunk ends early if these products would leave the range of float64.
- Each chunk computes its norms from the state itself, so rounding errors do not add up.
- All of this squares numbers in the dtype of the state. Where squares of inputs, states or limits
  overflow or underflow float32, and where values are not finite, a chunk is computed one token at a
  time in float64 instead.
- For the backend `native` without gradients, all this is one call of C++ (`native/limited.h`),
  in which each head and chunk is judged alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from longrnn.ops.precision import own_precision
from longrnn.ops.ssd import chunked, native
from longrnn.ops.ssd.base import SSD, ScanInputs, decayed
from longrnn.ops.ssd.decays import decay_between

CHUNK = 64
SEGMENT = 512
UNLIMITED = 1e150  # a limit that no state reaches, and whose square is finite
# Margin for rounding in comparisons with a limit, relative to the norms that enter them.
SLACK = 1e-4
# A chunk ends where the product of its scales gets this small; checked every CHECK_EVERY tokens.
MIN_PRODUCT = 1e-40
CHECK_EVERY = 4
# The fast path takes norms of x_t, of B_t and of a state up to the first three, and limits from the
# last. Squares of all products then fit into float32, and entries whose squares underflow are too
# small to bring a norm to its limit.
MAX_X, MAX_B, MAX_STATE, MIN_LIMIT = 1e12, 1e6, 1e18, 1e-6


class Norms(NamedTuple):
    """Norms of the inputs of some tokens and of the state before them, in the state's dtype.

    Attributes:
        x: of gain · x, `(b, t, h)`.
        B: `(b, t, g)`.
        state: `(b, h)`.
    """

    x: Tensor
    B: Tensor
    state: Tensor

    @property
    def added(self) -> Tensor:
        """‖u_t‖, `(b, t, h)`."""
        return self.x * self.B.repeat_interleave(self.x.shape[2] // self.B.shape[2], dim=2)


def rescaled_ssd(
    inputs: ScanInputs, state: Tensor, limit: Tensor, ssd: SSD
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence with a limit on the norm of the state.

    Args:
        inputs: see `ScanInputs`.
        state: `(b, h, p, n)`, float32 or float64. A state above its limit is rescaled at the
            first token.
        limit: the largest norm of each head's state, `(h,)` float64, at most `UNLIMITED`.
        ssd: computes the plain recurrence.

    Returns:
        y `(b, t, h, p)` and the final state.
    """
    if ssd is native.ssd and (found := _in_cpp(inputs, state, limit)) is not None:
        return found
    return _in_torch(inputs, state, limit, ssd)


def _in_torch(inputs: ScanInputs, state: Tensor, limit: Tensor, ssd: SSD) -> tuple[Tensor, Tensor]:
    """`rescaled_ssd` in differentiable operations."""
    if inputs.x.shape[1] == 1 and state.device.type != "cpu":
        # Which way is faster is read back from the device, and takes longer than a token.
        with own_precision(state):
            return _sequential(inputs, state, limit)
    usual = bool((limit >= MIN_LIMIT).all())
    outputs, start, time, size = [], 0, inputs.x.shape[1], SEGMENT
    with own_precision(state):
        while start < time:
            segment = inputs.slice(start, start + size)
            norms = _norms(segment, state)
            if not (usual and _moderate(norms, segment.log_decay)):
                size = CHUNK
                y, state = _sequential(segment.slice(0, size), state, limit)
                outputs.append(y)
                start += y.shape[1]
                continue
            free = _free_tokens(segment, state, norms, limit, ssd)
            # Try longer segments only while whole segments need no rescaling.
            size = min(2 * size, SEGMENT) if free == segment.x.shape[1] else CHUNK
            if free == 0:
                scales = _scales(segment.slice(0, CHUNK), state, limit)
                free = scales.shape[1]
                segment = _scaled(segment.slice(0, free), scales)
            y, state = ssd(segment.slice(0, free), state)
            outputs.append(y)
            start += free
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), state


def _in_cpp(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor] | None:
    if limit.device.type != "cpu" or not bool((limit >= MIN_LIMIT).all()):
        return None
    return native.limited(inputs, state, limit, UNLIMITED)


def scale_of(limit: Tensor, memory: Tensor, dim: tuple[int, ...]) -> Tensor:
    """min(1, limit / ‖memory‖) in float64, for any magnitude; NaN where the norm is NaN.

    Args:
        limit: broadcasts to the norms with `dim` kept.
        memory: of any dtype.
        dim: axes of the norm, kept with size 1.
    """
    wide = memory.double()
    # The square of a float64 above 1e154 overflows: divide each memory by its largest entry first.
    unit = wide.detach().abs().amax(dim, keepdim=True)
    unit = torch.where(unit.isfinite() & (unit > 0), unit, 1.0)
    norm = unit * torch.linalg.vector_norm(wide / unit, dim=dim, keepdim=True)
    return limit / norm.clamp(min=limit)


def scale_to(limit: Tensor, square: Tensor) -> Tensor:
    """min(1, limit / √square): exactly 1, with gradient 0, where the norm is within its limit."""
    return limit / square.clamp(min=limit.square()).sqrt()


def _sequential(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """One token at a time in float64; the state is rounded to its dtype after each token."""
    B, C = inputs.per_head(inputs.B), inputs.per_head(inputs.C)
    x = inputs.scaled_x(torch.float64)
    tokens = (part.double().unbind(1) for part in (x, inputs.log_decay, B))
    limit = limit[:, None, None]
    is_unlimited = limit >= UNLIMITED  # its scale is 1, whatever its state: 1 · NaN
    outputs = []
    for x_t, l_t, B_t, C_t in zip(*tokens, C.to(state.dtype).unbind(1), strict=True):
        wide = decayed(state.double(), l_t) + x_t[..., None] * B_t[..., None, :]
        scale = scale_of(limit, wide.masked_fill(is_unlimited, 0), (2, 3))
        state = (wide * scale).to(state.dtype)
        outputs.append((state @ C_t[..., None])[..., 0])
    return torch.stack(outputs, dim=1), state


@torch.no_grad()
def _norms(inputs: ScanInputs, state: Tensor) -> Norms:
    """See `Norms`."""
    B = inputs.B.to(state.dtype)
    return Norms(_norm_x(inputs, state.dtype), B.norm(dim=-1), state.flatten(2).norm(dim=-1))


def _norm_x(inputs: ScanInputs, dtype: torch.dtype) -> Tensor:
    """‖gain_t x_t‖, `(b, t, h)`."""
    return inputs.x.to(dtype).norm(dim=-1) * inputs.gain.to(dtype).abs()


def _moderate(norms: Norms, log_decay: Tensor) -> bool:
    """Whether all squares fit into float32; false where anything is NaN."""
    found = torch.stack([part.amax() for part in norms] + [log_decay.detach().amax().to(norms.x)])
    return bool((found <= found.new_tensor([MAX_X, MAX_B, MAX_STATE, 0.0])).all())


@torch.no_grad()
def _free_tokens(inputs: ScanInputs, state: Tensor, norms: Norms, limit: Tensor, ssd: SSD) -> int:
    """How many leading tokens certainly need no rescaling: whole chunks, or all tokens."""
    time, dtype, start, added = inputs.x.shape[1], state.dtype, norms.state, norms.added
    if not bool((start < (1 - SLACK) * limit).all()):
        return 0  # the state is at its limit, and will most likely be rescaled again
    bounds = _accumulate(added, inputs.log_decay, start)  # ‖ĥ_t‖ ≤ a_t ‖h_{t−1}‖ + ‖u_t‖
    if bool((bounds * (1 + SLACK) <= limit).all()):
        return time
    read, _ = ssd(inputs._replace(C=inputs.B), state)
    crossed = 2 * (inputs.scaled_x(dtype) * read).sum(-1) - added.square()
    squares = _accumulate(crossed, 2 * inputs.log_decay, start.square())
    # Comparisons with NaN are false, so a NaN counts as beyond the limit.
    within = squares + SLACK * bounds.square() <= limit.square()
    if bool(within.all()):
        return time
    first = int((~within).flatten(2).any(-1).any(0).nonzero()[0])
    return first - first % CHUNK


def _accumulate(added: Tensor, log_decay: Tensor, start: Tensor) -> Tensor:
    """v_t = exp(log_decay_t) v_{t−1} + added_t, `(b, t, h)`, from `start` `(b, h)`."""
    one = added.new_ones(*added.shape[:2], 1, 1)
    inputs = ScanInputs(one.expand(*added.shape, 1), added, log_decay, one, one)
    return chunked.ssd(inputs, start[..., None, None])[0][..., 0]


def _scales(inputs: ScanInputs, state: Tensor, limit: Tensor) -> Tensor:
    """The scales s_t of a chunk, `(b, t, h)` float64, possibly for its first tokens only."""
    products = _decayed_products(inputs, state).double().unbind(2)
    own = _squares(inputs, state.dtype).unbind(1)
    decays = (2 * inputs.log_decay.double()).exp().unbind(1)
    square = state.double().square().sum((2, 3))  # b h
    product = torch.ones_like(square)  # of all scales so far
    gains = product[..., None]  # 1 / the product of the scales before each token
    scales = []
    for t, (row, itself, decay) in enumerate(zip(products, own, decays, strict=True)):
        cross = (row[..., : t + 1] * gains).sum(-1) * product
        square = torch.addcmul(itself, decay, square).add(cross, alpha=2)
        scale = scale_to(limit, square)
        square = square * scale.square()
        scales.append(scale)
        gains = torch.cat([gains, product.reciprocal()[..., None]], dim=-1)
        product = product * scale
        if t % CHECK_EVERY == CHECK_EVERY - 1 and bool((product < MIN_PRODUCT).any()):
            break
    return torch.stack(scales, dim=1)


def _squares(inputs: ScanInputs, dtype: torch.dtype) -> Tensor:
    """‖u_t‖² in float64, `(b, t, h)`."""
    norm_B = inputs.per_head(inputs.B.to(dtype).norm(dim=-1))
    return (_norm_x(inputs, dtype) * norm_B).double().square()


def _decayed_products(inputs: ScanInputs, state: Tensor) -> Tensor:
    """a_{i+1} … a_t ⟨u_i, u_t⟩ at `[t, i]`, where u_0 is the state at the chunk's start.

    Returns:
        `(b, h, t, 1 + t)`; valid below the diagonal.
    """
    x = inputs.scaled_x(state.dtype).transpose(1, 2)  # b h t p
    B = inputs.B.to(state.dtype).transpose(1, 2)  # b g t n
    groups = B.shape[1]
    total = inputs.log_decay.double().clamp(min=-1e4).cumsum(1)  # b t h
    between = decay_between(total[:, None], state.dtype)[:, 0]  # b h t i
    alike = (B @ B.transpose(2, 3))[:, :, None]  # b g 1 t i
    among = ((x @ x.transpose(2, 3)) * between).unflatten(1, (groups, -1)) * alike
    rows = rearrange(state, "b (g r) p n -> b g (r p) n", g=groups)
    read = rearrange(rows @ B.transpose(2, 3), "b g (r p) t -> b (g r) p t", p=x.shape[3])
    start = (read * x.transpose(2, 3)).sum(2) * total.transpose(1, 2).exp().to(state.dtype)
    return torch.cat([start[..., None], among.flatten(1, 2)], dim=3)


def _scaled(inputs: ScanInputs, scales: Tensor) -> ScanInputs:
    """The inputs of the plain recurrence that equals the rescaled one."""
    return inputs._replace(
        gain=inputs.gain * scales.to(inputs.gain),
        log_decay=inputs.log_decay + scales.log().to(inputs.log_decay),
    )
