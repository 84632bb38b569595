"""Decays of a recurrence, one per head or one per key, and what they do between tokens of a chunk.

A decay between two tokens is the exponential of a sum of log decays, never a quotient or difference
of two such sums: every exponent is at most 0, −∞ is a valid log decay, and a strong decay costs the
slow ones after it no digits.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.transforms import is_transformed

# exp of a smaller number is a denormal float32, with which a CPU is up to 60 times slower.
FLOOR = -80.0
# Stands for a log decay of −∞, because −∞ − −∞ is NaN; its exp is 0 in float64. A lower number
# would cost the decays after it their digits, which the delta rule amplifies.
LEAST_LOG_DECAY = -800.0


class ChunkDecays(NamedTuple):
    """What decays do between the c tokens of a chunk; k is 1, or n with decays per key.

    Attributes:
        scores: for each kind of queries `(…, h, c, c)`; at `[i, j]`, what token i reads of token j:
            0 for j > i.
        since_start: `(…, h, c, k)`, the log decays from the chunk's start through each token.
        to_end: `(…, h, c, k)`, the log decays after each token, to the chunk's end.
    """

    scores: Sequence[Tensor]
    since_start: Tensor
    to_end: Tensor


def decay_exp(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp in `dtype`, and 0 below FLOOR."""
    return log_decay.masked_fill(log_decay < FLOOR, -math.inf).to(dtype).exp()


def advance(state: Tensor, log_decay: Tensor, added: Tensor) -> Tensor:
    """exp(log_decay) state + added, rounded once; 0 · state is 0 only where the state is finite.

    Args:
        state: `(b, h, p, n)`.
        log_decay: `(b, h, 1)`, or per key `(b, h, n)`.
        added: `(b, h, p, n)`.
    """
    slow, rest = (part.to(state) for part in decay_parts(log_decay[..., None, :]))
    return slow * state + (rest * state + added)


def decay_parts(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """exp(log_decay) as 0 or 1 and a remainder.

    A float32 near 1 that is rounded the same way at every token would let a long memory drift.
    """
    slow = log_decay > -0.69  # the decay is nearer to 1 than to 0
    return slow.to(log_decay), torch.where(slow, log_decay.expm1(), log_decay.exp())


def chunk_decays(queries: Sequence[Tensor], keys: Tensor, log_decay: Tensor) -> ChunkDecays:
    """Σ_n q_i k_j exp(Σ_{j < l ≤ i} log_decay_l) for all tokens j ≤ i of a chunk.

    Args:
        queries: one or several kinds, `(…, g, c, n)` each.
        keys: `(…, g, c, n)`.
        log_decay: `(…, h, c, k)`, where k is 1 or n.
    """
    heads = log_decay.shape[-3] // keys.shape[-3]
    if log_decay.shape[-1] == keys.shape[-1] > 1:
        queries = [one.repeat_interleave(heads, -3) for one in queries]
        keys, log_decay = keys.repeat_interleave(heads, -3), log_decay.to(keys.dtype)
        scores, since_start, to_end = _key_decays(torch.stack(queries, -2), keys, log_decay)
        return ChunkDecays(scores.unbind(-2), since_start, to_end)
    total = log_decay.double().clamp(min=LEAST_LOG_DECAY).cumsum(-2)
    log_between = (total - total.mT).to(keys.dtype)
    future = torch.ones(log_between.shape[-2:], dtype=torch.bool, device=keys.device).triu(1)
    decay = log_between.masked_fill(future | (log_between < FLOOR), -math.inf).exp()
    scores = [(one @ keys.mT).repeat_interleave(heads, -3) * decay for one in queries]
    return ChunkDecays(scores, total, total[..., -1:, :] - total)


def _key_decays(queries: Tensor, keys: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_decays` with decays per key, by halves of blocks.

    Blocks of 1, 2, 4, … tokens are joined in pairs: what a token of the right half reads of one of
    the left half has decayed to the border between them, and from there to the reader.

    Args:
        queries: `(…, c, r, n)`, of r kinds.
        keys: `(…, c, n)`.
        log_decay: `(…, c, n)`, at most 0.

    Returns:
        The scores `(…, c, r, c)`, and the log decays since the start and to the end.
    """
    count = keys.shape[-2]
    size = 1 << (count - 1).bit_length()
    # Padding neither decays nor is read.
    queries = F.pad(queries, (0, 0, 0, 0, 0, size - count))[..., None, :, :]  # … blocks i r n
    keys, since = (
        F.pad(given, (0, 0, 0, size - count))[..., None, :] for given in (keys, log_decay)
    )
    to_end = torch.zeros_like(since)
    scores = queries @ keys[..., None, :, :].mT  # … blocks i r j
    length = 1
    while length < size:
        queries_right = queries.unflatten(-4, (-1, 2))[..., 1, :, :, :]
        keys_left = keys.unflatten(-3, (-1, 2))[..., 0, :, :]
        since_left, since_right = since.unflatten(-3, (-1, 2)).unbind(-3)
        end_left, end_right = to_end.unflatten(-3, (-1, 2)).unbind(-3)
        scores_left, scores_right = scores.unflatten(-4, (-1, 2)).unbind(-4)
        reads = queries_right * decay_exp(since_right, keys.dtype)[..., None, :]
        written = keys_left * decay_exp(end_left, keys.dtype)
        across = (reads.flatten(-3, -2) @ written.mT).unflatten(-2, (length, -1))
        scores = torch.cat(
            [F.pad(scores_left, (0, length)), torch.cat([across, scores_right], -1)], -3
        )
        since = torch.cat([since_left, since_left[..., -1:, :] + since_right], -2)
        to_end = torch.cat([end_left + since_right[..., -1:, :], end_right], -2)
        keys = keys.unflatten(-3, (-1, 2)).flatten(-3, -2)
        queries = queries.unflatten(-4, (-1, 2)).flatten(-4, -3)
        length *= 2
    return scores[..., 0, :count, :, :count], since[..., 0, :count, :], to_end[..., 0, :count, :]


def all_states(whole: Tensor, rest: Tensor, added: Tensor, before: Tensor) -> Tensor:
    """h_t = whole_t h_{t−1} + (rest_t h_{t−1} + added_t) of all tokens.

    Args:
        whole: `(b, t, …)`, and so are rest and added.
        rest: the decay is whole + rest.
        added: to the state.
        before: `(b, …)`, the state before the first token.
    """
    if is_transformed():
        return _all_states(whole, rest, added, before)
    return _AllStates.apply(whole, rest, added, before)


def _all_states(whole: Tensor, rest: Tensor, added: Tensor, before: Tensor) -> Tensor:
    states, h = [], before
    per_token = zip(whole.unbind(1), rest.unbind(1), added.unbind(1), strict=True)
    for whole_t, rest_t, added_t in per_token:
        h = torch.addcmul(torch.addcmul(added_t, rest_t, h), whole_t, h)
        states.append(h)
    return torch.stack(states, 1)


class _AllStates(torch.autograd.Function):
    """`all_states`, whose backward pass is the same from the last token to the first.

    Autograd would record some operations per token, which take most of the time.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rest: Tensor, added: Tensor, before: Tensor) -> Tensor:
        states = _all_states(whole, rest, added, before)
        ctx.save_for_backward(whole, rest, before, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        whole, rest, before, states = ctx.saved_tensors
        # The gradient by a state decays by the factor of the token after it.
        later_whole, later_rest = (
            torch.cat([torch.zeros_like(part[:, :1]), part.flip(1)[:, :-1]], 1)
            for part in (whole, rest)
        )
        start = torch.zeros_like(before)
        grad_added = _AllStates.apply(later_whole, later_rest, grad.flip(1), start).flip(1)
        previous = torch.cat([before[:, None], states[:, :-1]], 1)
        grad_rest = (grad_added * previous).sum_to_size(rest.shape)
        grad_before = whole[:, 0] * grad_added[:, 0] + rest[:, 0] * grad_added[:, 0]
        return None, grad_rest, grad_added, grad_before
