"""The recurrence with a limit on the norm of each head's state.

    ĥ_t = a_t h_{t−1} + u_t,  u_t = gain_t x_t B_tᵀ,  h_t = s_t ĥ_t,  s_t = min(1, limit / ‖ĥ_t‖)

Given all scales s_t, this is the plain recurrence with decays s_t a_t and inputs s_t u_t. Computing
the scales needs no state: within a chunk ĥ_t is a weighted sum of u_i, where u_0 is the state at
the chunk's start, so norms are quadratic forms in ⟨u_i, u_j⟩ = gain_i gain_j ⟨x_i, x_j⟩ ⟨B_i, B_j⟩.
Only a few operations on one number per head remain sequential. With decays per key a state does not
keep its direction when it decays, so that norms do not follow from products of inputs, and tokens
are computed one after another wherever a limit may be reached. So they are under the delta rule,
where what a token erases depends on the state.

Notable choices:
- Where the triangle inequality shows that no state of a segment can reach its limit, the plain
  recurrence computes the segment.
- Products of inputs are computed in float64, in which the squares of any float32 are finite.
"""

from functools import partial

import torch
from torch import Tensor

from longrnn.ops.precision import own_precision
from longrnn.ops.scan.decays import chunk_decays
from longrnn.ops.scan.definition import CHUNK, SEGMENT, Scan, scan
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.transforms import in_vmap

# Stands for no limit: no state reaches it, and its square is finite.
UNLIMITED = 1e150
# Margin for rounding in the triangle inequality.
SLACK = 1e-4
# A chunk ends where the product of its scales gets this small, because its inverse is needed.
MIN_PRODUCT = 1e-100


def limited(
    inputs: ScanInputs, state: Tensor, limit: Tensor, plain: Scan = scan, *, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes the recurrence with a limit, in differentiable operations.

    Args:
        inputs: t >= 1.
        state: `(b, h, p, n)`. A state above its limit is rescaled at the first token.
        limit: the largest norm of each head's state, `(h,)` float64, above 0; may be infinite; or
            that at each token, `(t, h)`.
        plain: computes the recurrence without a limit.
        erases: whether tokens follow the delta rule.

    Returns:
        y `(b, t, h, p)` and the state after the last token.
    """
    plain = partial(plain, erases=True) if erases else plain
    one_by_one = erases or inputs.has_key_decays
    outputs, start, time = [], 0, inputs.x.shape[1]
    # The bounds of a head of one channel are as large as the decays of its keys.
    size = longest = CHUNK if inputs.has_key_decays and inputs.x.shape[3] == 1 else SEGMENT
    limit = limit.clamp(max=UNLIMITED).expand(time, -1)
    with own_precision(state):
        if in_vmap():
            return _token_by_token(inputs, state, limit, plain)
        while start < time:
            part, highest = inputs.slice(start, start + size), limit[start : start + size]
            is_plain = _is_within(part, state, highest, plain if erases else None)
            if not is_plain and size > CHUNK:
                size = CHUNK
                continue
            if is_plain:
                y, state = plain(part, state)
            elif one_by_one:
                y, state = _token_by_token(part, state, highest, plain)
            else:
                y, state = _rescaled(part, state, highest, plain)
            outputs.append(y)
            start += y.shape[1]
            size = min(2 * size, longest) if is_plain else CHUNK
    return torch.cat(outputs, dim=1), state


def _token_by_token(
    inputs: ScanInputs, state: Tensor, limit: Tensor, plain: Scan
) -> tuple[Tensor, Tensor]:
    """The recurrence with a limit `(t, h)`, whose outputs are scaled with the state."""
    outputs = []
    for t, highest in enumerate(limit[:, :, None, None]):
        y, state = plain(inputs.slice(t, t + 1), state)
        norm = state.double().norm(dim=(2, 3), keepdim=True)
        scale = (highest / norm.clamp(min=highest)).to(state)
        state = state * scale
        outputs.append(y * scale[:, None, :, :, 0])
    return torch.cat(outputs, dim=1), state


def _rescaled(
    inputs: ScanInputs, state: Tensor, limit: Tensor, plain: Scan
) -> tuple[Tensor, Tensor]:
    """The rescaled recurrence as a plain one, possibly for the first tokens only."""
    scales = _scales(inputs, state, limit)
    inputs = inputs.slice(0, scales.shape[1])
    gain, keep = inputs.gain * scales.to(inputs.gain), inputs.decay.keep
    decay = inputs.decay._replace(keep=scales if keep is None else keep * scales)
    return plain(inputs._replace(gain=gain, decay=decay), state)


def rescale(memory: Tensor, limit: Tensor) -> Tensor:
    """memory · min(1, limit / ‖memory‖) over the last axis, for any magnitude.

    Args:
        memory: `(b, d)`.
        limit: `(1,)`, float64; may be infinite.
    """
    wide, limit = memory.double(), limit.clamp(max=UNLIMITED)
    # The square of a float64 above 1e154 overflows: divide each row by its largest entry first.
    unit = wide.detach().abs().amax(-1, keepdim=True)
    unit = torch.where(unit.isfinite() & (unit > 0), unit, 1.0)
    norm = unit * torch.linalg.vector_norm(wide / unit, dim=-1, keepdim=True)
    return (wide * (limit / norm.clamp(min=limit))).to(memory.dtype)


@torch.no_grad()
def _is_within(inputs: ScanInputs, state: Tensor, limit: Tensor, erasing: Scan | None) -> bool:
    """Whether no state exceeds its limit, by ‖ĥ_t‖ ≤ a_t ‖h_{t−1}‖ + ‖u_t‖; false for NaN.

    With decays per key, this holds for each column of a state. If tokens erase, `erasing` computes
    the states of all tokens, and short calls are within a limit too where all scales are 1.
    """
    if erasing is not None:
        inputs = _without_erasing(inputs, state, erasing)
    heads = inputs.x.shape[2]
    added, start = _norms_of_inputs(inputs), state.double().norm(dim=2)
    if inputs.has_key_decays:
        added = added[..., None] * inputs.per_head(inputs.B).double().abs()
    else:
        added, start = added * inputs.per_head(inputs.B).double().norm(dim=-1), start.norm(dim=2)
    added, log_decay = added.flatten(2), inputs.decay.log().double().flatten(2)
    ones = torch.ones_like(added[:, :, :1, None])
    bounds = ScanInputs(ones.expand(*added.shape, 1), added, Decay(log_decay), ones, ones)
    bound, _ = scan(bounds, start.flatten(1)[..., None, None])
    bound = bound.unflatten(2, (heads, -1)).norm(dim=(3, 4))
    is_bounded = bool((bound * (1 + SLACK) <= limit).all())
    if is_bounded or erasing is None or inputs.has_key_decays or inputs.x.shape[1] > CHUNK:
        return is_bounded
    return bool((_scales(inputs, state, limit) == 1).all())


def _without_erasing(inputs: ScanInputs, state: Tensor, erasing: Scan) -> ScanInputs:
    """The inputs of the plain recurrence that has the same states as the delta rule."""
    # Each token but the first reads the state before it: h_{t−1} diag(a_t) k_t is the output for
    # q = diag(a_t) k_t.
    keys = inputs.per_head(inputs.B).to(state) * inputs.log_decay().exp().to(state)
    following = torch.cat([keys[:, 1:], keys[:, :1]], dim=1)
    first = (state @ keys[:, 0, ..., None])[:, None, ..., 0]
    read, _ = erasing(inputs._replace(B=inputs.per_head(inputs.B), C=following), state)
    return inputs._replace(x=inputs.x.to(state) - torch.cat([first, read[:, :-1]], dim=1))


def _norms_of_inputs(inputs: ScanInputs) -> Tensor:
    """‖gain_t x_t‖ in float64, `(b, t, h)`."""
    return inputs.x.double().norm(dim=-1) * inputs.gain.double().abs()


def _scales(inputs: ScanInputs, state: Tensor, limit: Tensor) -> Tensor:
    """The scales s_t of a chunk, `(b, t, h)` float64, possibly for its first tokens only."""
    products = _decayed_products(inputs, state).unbind(2)
    added = _norms_of_inputs(inputs) * inputs.per_head(inputs.B).double().norm(dim=-1)
    squares = added.square().unbind(1)
    decays = (2 * inputs.decay.log().double()).exp().unbind(1)
    square = state.double().square().sum((2, 3))  # b h, of the last state
    product = torch.ones_like(square)  # of all scales so far
    inverses = product[..., None]  # 1 / the product of the scales before each token
    scales = []
    highest = limit.expand(len(squares), -1)
    for t, (row, added_square, decay) in enumerate(zip(products, squares, decays, strict=True)):
        cross = (row[..., : t + 1] * inverses).sum(-1) * product
        square = added_square + decay * square + 2 * cross
        # Exactly 1 within the limit.
        scale = highest[t] / square.clamp(min=highest[t].square()).sqrt()
        square = square * scale.square()
        scales.append(scale)
        inverses = torch.cat([inverses, product.reciprocal()[..., None]], dim=-1)
        product = product * scale
        if bool((product < MIN_PRODUCT).any()):
            break
    return torch.stack(scales, dim=1)


def _decayed_products(inputs: ScanInputs, state: Tensor) -> Tensor:
    """a_{i+1} … a_t ⟨u_i, u_t⟩ at `[t, i]` below the diagonal, where u_0 is the given state.

    Returns:
        `(b, h, t, 1 + t)` float64.
    """
    u = (inputs.x.double() * inputs.gain.double()[..., None]).transpose(1, 2)  # b h t p
    B = inputs.B.double().transpose(1, 2)  # b g t n
    (alike,), since_start, _ = chunk_decays([B], B, inputs.log_decay().transpose(1, 2))
    read = B.repeat_interleave(u.shape[1] // B.shape[1], 1) @ state.double().mT
    start = (read * u).sum(-1, keepdim=True) * since_start.exp()
    return torch.cat([start, (u @ u.mT) * alike], dim=3)
