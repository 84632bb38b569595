"""The recurrence of scanning cells.

    h_t = h_{t−1} diag(a_t) + gain_t x_t B_tᵀ,   y_t = h_t C_t,   a_t = exp(log_decay_t)

The decay is one number per head, or one per key, a column of h. Where tokens erase, they follow the
gated delta rule (arXiv 2412.06464; with decays per key arXiv 2510.26692): x_t − h_{t−1} diag(a_t)
B_t takes the place of x_t. h is then the papers' Sᵀ, with k = B_t, v = x_t, q = C_t and β = gain_t.

`loop` is the definition, one token at a time (arXiv 2405.21060, section 2). `scan` computes the
same as matrix products over chunks (section 6), or for heads of one channel (Mamba-1) entry by
entry. All consist of operations that torch differentiates any number of times, in both directions
and under `torch.func`.

Notable choices:
- With decays per head, those between two tokens of a chunk are differences of a running sum in
  float64. In float32, one token with a strong decay would cost the slow decays after it their
  digits. With decays per key, see `longrnn.ops.scan.decays`.
- The factor of the state is applied as 0 or 1 plus a remainder: a float32 near 1 that is rounded
  the same way every time lets a long memory drift.
- Time is cut into segments. With gradients, the backward pass computes the intermediate values of a
  segment again, so that memory holds its inputs and one state per segment.
- What the tokens of a chunk add under the delta rule solves a triangular system (the WY form). What
  such a token reads is the state at its chunk's start minus what was erased since: in float32,
  tokens after which most of that state is erased read the little that is left with an error of
  about 1e-7 of the state at the chunk's start. The state after the chunk has no such error.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from longrnn.ops.precision import own_precision
from longrnn.ops.scan.decays import advance, all_states, chunk_decays, decay_exp, decay_parts
from longrnn.ops.scan.inputs import ScanInputs
from longrnn.ops.transforms import recomputed

CHUNK = 64
# With more, solving for what tokens of the delta rule add would cost more time and digits.
DELTA_CHUNK = 32
SEGMENT = 512
# Up to this many tokens are computed one by one, which is faster than a chunk.
FEW = 2
# Tokens of a segment that is computed entry by entry, and the least number of entries for which
# that is faster than chunks with decays per head; chosen on a CPU.
ENTRY_SEGMENT = 64
LEAST_ENTRIES = 8


Scan = Callable[..., tuple[Tensor, Tensor]]


def loop(
    inputs: ScanInputs, state: Tensor | None = None, *, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes one token after another; see `scan`."""
    state = inputs.zero_state() if state is None else state
    inputs, outputs = inputs.to(state.dtype), []
    x, gain, _, B, C = inputs
    log_decay = inputs.log_decay()
    per_token = (x, gain[..., None], log_decay, inputs.per_head(B), inputs.per_head(C))
    for x_t, gain_t, log_t, B_t, C_t in zip(*(one.unbind(1) for one in per_token), strict=True):
        if erases:
            x_t = x_t - (state @ (log_t.exp() * B_t)[..., None])[..., 0]
        state = advance(state, log_t, (gain_t * x_t)[..., None] * B_t[..., None, :])
        outputs.append((state @ C_t[..., None])[..., 0])
    return torch.stack(outputs, dim=1), state


def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes the recurrence.

    Args:
        inputs: t >= 1. If tokens erase, the gain must be 0 at padding.
        state: `(b, h, p, n)`, float32 or float64; None for zeros.
        final: whether the state after the last token is needed; if not, that part of the result has
            no meaning.
        erases: whether tokens follow the delta rule.

    Returns:
        y `(b, t, h, p)` and the state after the last token, both in the dtype of the state.
    """
    if is_entrywise(inputs) and not erases:
        return in_segments(inputs, state, _entries, _entries, ENTRY_SEGMENT)
    size = min(DELTA_CHUNK, CHUNK) if erases else CHUNK
    few, segment = partial(loop, erases=erases), partial(in_chunks, size=size, erases=erases)
    return in_segments(inputs, state, few, segment)


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
    inputs: ScanInputs, state: Tensor, *, size: int, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """The recurrence for a few chunks, of which the last may be shorter; see `chunks`."""
    time = inputs.x.shape[1]
    whole = time - time % size
    outputs = []
    for start, stop, length in ((0, whole, size), (whole, time, time - whole)):
        if start < stop:
            y, state = chunks(inputs.slice(start, stop), state, length, erases=erases)
            outputs.append(y)
    return torch.cat(outputs, dim=1), state


def chunks(
    inputs: ScanInputs, state: Tensor, size: int, *, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """The recurrence for whole chunks; tensors are `(b, m, h, i, …)` for tokens i of chunks m.

    Args:
        inputs: of m · size tokens.
        state: before the first token.
        size: tokens per chunk.
        erases: whether tokens follow the delta rule.
    """
    dtype, heads = state.dtype, inputs.x.shape[2] // inputs.B.shape[2]

    def cut(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, size)).transpose(2, 3)

    x, gain = cut(inputs.x.to(dtype)), cut(inputs.gain.to(dtype)[..., None])
    B, C = cut(inputs.B.to(dtype)), cut(inputs.C.to(dtype))
    (scores, *alike), since_start, to_end = chunk_decays(
        [C, B] if erases else [C], B, cut(inputs.log_decay())
    )
    B, C = (shared.repeat_interleave(heads, 2) for shared in (B, C))
    since, u, erased = decay_exp(since_start, dtype), gain * x, None
    if erases:  # u loses erased · h, where h is the state before the chunk
        right = torch.cat([u, gain * since * B], dim=-1)
        matrix = gain * alike[0]
        solved = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
        u, erased = solved.split([u.shape[-1], B.shape[-1]], dim=-1)
    kept = B * decay_exp(to_end, dtype)
    states, updates = [], []
    for m in range(x.shape[1]):
        states.append(state)
        update = u[:, m] if erased is None else u[:, m] - erased[:, m] @ state.mT
        updates.append(update)
        state = advance(state, since_start[:, m, :, -1], update.mT @ kept[:, m])
    y = scores @ torch.stack(updates, 1) + (C * since) @ torch.stack(states, 1).mT
    return y.transpose(2, 3).flatten(1, 2), state


def is_entrywise(inputs: ScanInputs) -> bool:
    """Whether the entries of the state are computed one by one: there is one channel per head."""
    rows, _, heads, channels = inputs.x.shape
    if inputs.has_key_decays:
        return channels == 1
    return channels == inputs.B.shape[3] == 1 and rows * heads >= LEAST_ENTRIES


def _entries(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence of heads r of groups g, with one channel, token by token."""
    groups = inputs.B.shape[2]
    inputs = inputs.to(state.dtype)
    x, gain, _, B, C = inputs
    log_decay = inputs.log_decay()
    whole, rest = decay_parts(log_decay.unflatten(2, (groups, -1)))  # b t g r n
    u = (x[..., 0] * gain).unflatten(2, (groups, -1))
    added = u[..., None] * B[:, :, :, None]
    before = state[:, :, 0].unflatten(1, (groups, -1))
    states = all_states(whole, rest, added, before)
    y = states @ C[..., None]
    return y.flatten(2, 3), states[:, -1].flatten(1, 2)[:, :, None].clone()
