"""The recurrence of scanning cells.

h_t = h_{t−1} diag(exp(log_decay_t)) + gain_t x_t B_tᵀ, y_t = h_t C_t.

The decay is one number per head, or one per key, a column of h. `loop` is the definition, one token
at a time (arXiv 2405.21060, section 2). `scan` computes the same as matrix products over chunks
(section 6), or for heads of one channel (Mamba-1) entry by entry. All consist of operations that
torch differentiates any number of times, in both directions and under `torch.func`.

Notable choices:
- With decays per head, those between two tokens of a chunk are differences of a running sum in
  float64. In float32, one token with a strong decay would cost the slow decays after it their
  digits. With decays per key, see `longrnn.ops.scan.decays`.
- The factor of the state is applied as 0 or 1 plus a remainder: a float32 near 1 that is rounded
  the same way every time lets a long memory drift.
- Time is cut into segments. With gradients, the backward pass computes the intermediate values of a
  segment again, so that memory holds its inputs and one state per segment.
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from longrnn.ops.precision import own_precision
from longrnn.ops.scan.decays import FLOOR, advance, all_states, decay_exp, decay_parts, key_decays
from longrnn.ops.scan.inputs import ScanInputs
from longrnn.ops.transforms import recomputed

CHUNK = 64
SEGMENT = 512
# Up to this many tokens are computed one by one, which is faster than a chunk.
FEW = 2
# Stands for a log decay of −∞, because −∞ − −∞ is NaN; its exp is 0 in every dtype.
LEAST_LOG_DECAY = -1e4
# Tokens of a segment that is computed entry by entry, and the least number of entries for which
# that is faster than chunks with decays per head; chosen on a CPU.
ENTRY_SEGMENT = 64
LEAST_ENTRIES = 8


Scan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]


def loop(inputs: ScanInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes one token after another; see `scan`."""
    state = inputs.zero_state() if state is None else state
    x, gain, decay, B, C = inputs.to(state.dtype)
    u, B, C = x * gain[..., None], inputs.per_head(B), inputs.per_head(C)
    outputs = []
    per_token = zip(*(tensor.unbind(1) for tensor in (u, decay.log(), B, C)), strict=True)
    for u_t, log_t, B_t, C_t in per_token:
        state = advance(state, log_t, u_t[..., :, None] * B_t[..., None, :])
        outputs.append((state @ C_t[..., None])[..., 0])
    return torch.stack(outputs, dim=1), state


def reversible(scan: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Gives a scan the argument `backward`: it then reads the last token first."""

    @wraps(scan)
    def directed(
        inputs: ScanInputs, state: Tensor | None = None, *, backward: bool = False, **others: Any
    ) -> tuple[Tensor, Tensor]:
        if not backward:
            return scan(inputs, state, **others)
        y, after = scan(inputs.each(lambda tensor: tensor.flip(1)), state, **others)
        return y.flip(1), after

    return directed


@reversible
def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """Computes the recurrence.

    Args:
        inputs: t >= 1.
        state: `(b, h, p, n)`, float32 or float64; None for zeros.
        final: whether the state after the last token is needed; if not, that part of the result has
            no meaning.
        backward: whether time runs from the last token to the first.

    Returns:
        y `(b, t, h, p)` and the state after the last token, both in the dtype of the state.
    """
    if is_entrywise(inputs):
        return in_segments(inputs, state, _entries, _entries, ENTRY_SEGMENT)
    chunks = _key_chunks if inputs.has_key_decays else _chunks
    return in_segments(inputs, state, loop, partial(in_chunks, chunks=chunks, size=CHUNK))


def in_segments(
    inputs: ScanInputs, state: Tensor | None, few: Scan, segment: Scan, length: int = SEGMENT
) -> tuple[Tensor, Tensor]:
    """Computes a recurrence segment by segment.

    Args:
        inputs: t >= 1.
        state: before the first token; None for zeros.
        few: computes at most FEW tokens.
        segment: computes a segment.
        length: tokens of a segment.
    """
    memory = inputs.zero_state() if state is None else state
    outputs, time = [], inputs.x.shape[1]
    with own_precision(memory):
        if time <= FEW:
            return few(inputs, memory)
        for part in inputs.split(length):
            y, memory = recomputed(segment, part, memory)
            outputs.append(y)
    return torch.cat(outputs, dim=1), memory


def in_chunks(
    inputs: ScanInputs,
    state: Tensor,
    chunks: Callable[[ScanInputs, Tensor, int], tuple[Tensor, Tensor]],
    size: int,
) -> tuple[Tensor, Tensor]:
    """The recurrence for a few chunks, of which the last may be shorter."""
    time = inputs.x.shape[1]
    whole = time - time % size
    outputs = []
    for start, stop, length in ((0, whole, size), (whole, time, time - whole)):
        if start < stop:
            y, state = chunks(inputs.slice(start, stop), state, length)
            outputs.append(y)
    return torch.cat(outputs, dim=1), state


def _chunks(inputs: ScanInputs, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The recurrence for whole chunks m of tokens i and j, with heads r of groups g."""
    dtype, heads, groups = state.dtype, inputs.x.shape[2], inputs.B.shape[2]

    def cut(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, size))

    def grouped(tensor: Tensor, dim: int) -> Tensor:
        return tensor.unflatten(dim, (groups, heads // groups))

    u = grouped(cut(inputs.x.to(dtype) * inputs.gain.to(dtype)[..., None]), 3)  # b m j g r p
    B, C = cut(inputs.B.to(dtype)), cut(inputs.C.to(dtype))
    total = cut(inputs.decay.log().double().clamp(min=LEAST_LOG_DECAY)).cumsum(2)  # b m i h
    last = total[:, :, -1]

    # Within a chunk: attention with the decay between j and i.
    between = (total[:, :, :, None] - total[:, :, None]).to(dtype)  # b m i j h
    future = torch.ones(size, size, dtype=torch.bool, device=u.device).triu(1)
    decay = between.masked_fill(future[..., None] | (between < FLOOR), -math.inf).exp()
    scores = torch.einsum("bmign,bmjgn->bmgij", C, B)
    weights = scores[:, :, :, None] * grouped(decay.permute(0, 1, 4, 2, 3), 2)  # b m g r i j
    y = torch.einsum("bmgrij,bmjgrp->bmigrp", weights, u)

    # Between chunks: what each adds to the state, and what its tokens read of the state before it.
    to_end = grouped(decay_exp(last[:, :, None] - total, dtype), 3)  # b m j g r
    added = torch.einsum("bmjgrp,bmjgn->bmgrpn", u * to_end[..., None], B).flatten(2, 3)
    starts = []
    for m in range(total.shape[1]):
        starts.append(state)
        state = advance(state, last[:, m], added[:, m])
    since = grouped(decay_exp(total, dtype), 3)
    read = torch.einsum("bmign,bmgrpn->bmigrp", C, grouped(torch.stack(starts, 1), 2))
    y = y + read * since[..., None]
    return y.flatten(3, 4).flatten(1, 2), state


def _key_chunks(inputs: ScanInputs, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`_chunks` with decays per key; tensors are `(b, m, h, i, …)` for tokens i of chunks m."""
    dtype = state.dtype

    def cut(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).unflatten(1, (-1, size)).transpose(2, 3)

    u = cut(inputs.x) * cut(inputs.gain[..., None])
    B, C = cut(inputs.per_head(inputs.B)), cut(inputs.per_head(inputs.C))
    log_decay = cut(inputs.decay.log())
    scores, since_start, to_end = key_decays(C[..., None, :], B, log_decay)
    added = u.mT @ (B * decay_exp(to_end, dtype))
    starts = []
    for m in range(u.shape[1]):
        starts.append(state)
        state = advance(state, since_start[:, m, :, -1], added[:, m])
    read = (C * decay_exp(since_start, dtype)) @ torch.stack(starts, 1).mT
    return (scores[..., 0, :] @ u + read).transpose(2, 3).flatten(1, 2), state


def is_entrywise(inputs: ScanInputs) -> bool:
    """Whether the entries of the state are computed one by one: there is one channel per head."""
    rows, _, heads, channels = inputs.x.shape
    if inputs.has_key_decays:
        return channels == 1
    return channels == inputs.B.shape[3] == 1 and rows * heads >= LEAST_ENTRIES


def _entries(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence of heads r of groups g, with one channel, token by token."""
    groups = inputs.B.shape[2]
    x, gain, decay, B, C = inputs.to(state.dtype)
    log_decay = decay.log() if decay.is_per_key else decay.log()[..., None]
    whole, rest = decay_parts(log_decay.unflatten(2, (groups, -1)))  # b t g r n
    u = (x[..., 0] * gain).unflatten(2, (groups, -1))
    added = u[..., None] * B[:, :, :, None]
    before = state[:, :, 0].unflatten(1, (groups, -1))
    states = all_states(whole, rest, added, before)
    y = states @ C[..., None]
    return y.flatten(2, 3), states[:, -1].flatten(1, 2)[:, :, None].clone()
