# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""Device functions of one chunk of the recurrence: tiles, decays, and the state after it.

Notable choices:
- Decays between two tokens are differences of one running sum, which is added up in float64 and
  kept as two numbers of the dtype of the state, `high` and `low`: one strong decay must not cost
  the slow decays after it their digits.
- A log decay of −∞ becomes LEAST, whose exp is 0 in float32 and float64: a document begins. Where
  NaN or infinity stands before it, 0 · NaN makes the chunk NaN; see `recurrence`.
- A state is carried as (n, p), transposed, and stored as (p, n).
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-800.0)
# Above one half of decay, 1 is nearer than 0.
SLOW = tl.constexpr(-0.69)


@triton.jit
def chunk_of_program(time, heads, skip, H: tl.constexpr, L: tl.constexpr):
    """What a program of a grid of chunks · heads computes.

    Args:
        time: how many tokens a row has.
        heads: of all rows.
        skip: tokens before the first chunk.
        H: heads of a row.
        L: tokens of a chunk.

    Returns:
        The number of the program, int64; the row of the batch and the head in it; the first token
        of the chunk, int64, and how many of its tokens exist.
    """
    program = tl.program_id(0).to(tl.int64)
    head, start = program % heads, skip + program // heads * L
    return program, head // H, head % H, start, tl.minimum(time - start, L).to(tl.int32)


@triton.jit
def load_tile(base, row, token, offset, row_stride, token_stride, j, column, left, WIDTH):
    """Entries `[token + j, offset + column]` of a row of a `(b, t, …)` tensor, `(j, column)`.

    Args:
        base: pointer.
        row: of the batch, int64.
        token: the first one of the chunk, int64.
        offset: of the head or group.
        row_stride: distance of two rows.
        token_stride: distance of two tokens.
        j: numbers of the tokens of the chunk.
        column: numbers of the entries.
        left: how many tokens of the chunk exist; the others are 0.
        WIDTH: how many entries exist.
    """
    start = base + row * row_stride + token * token_stride + offset
    inside = (j < left)[:, None] & (column < WIDTH)[None, :]
    return tl.load(start + (j[:, None] * token_stride + column[None, :]), mask=inside, other=0.0)


@triton.jit
def running_sums(log_decay, ACC: tl.constexpr):
    """Sums of log decays from the start of a chunk, as two numbers of `ACC`, and their total.

    Args:
        log_decay: `(j,)`, 0 after the last token.
        ACC: dtype of the state.

    Returns:
        high, low `(j,)`, and the total in float64.
    """
    wide = log_decay.to(tl.float64)
    wide = tl.where(wide < LEAST, LEAST, wide)  # unlike a maximum, this keeps NaN
    total = tl.cumsum(wide, 0)
    high = total.to(ACC)
    low = (total - high.to(tl.float64)).to(ACC)
    return high, low, tl.sum(wide, 0)


@triton.jit
def decay_to_end(high, low, total, ACC: tl.constexpr):
    """exp of the sum of the log decays after each token, `(j,)`."""
    top = total.to(ACC)
    rest = (total - top.to(tl.float64)).to(ACC)
    return tl.exp((top - high) + (rest - low))


@triton.jit
def decay_between(high, low, j):
    """exp of the sum of the log decays over (j, i], `(i, j)`: 0 where j > i."""
    gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(j[:, None] >= j[None, :], tl.exp(tl.minimum(gap, 0.0)), 0.0)


@triton.jit
def decayed(state, added, log_decay, ACC: tl.constexpr):
    """exp(log_decay) · state + added, rounded once.

    The decay is 0 or 1 plus a rest that keeps its digits: a number near 1 that is rounded the same
    way every time lets a long memory drift.

    Args:
        state: a tile in `ACC`.
        added: a tile in `ACC`.
        log_decay: a float64 number.
        ACC: dtype of the state.
    """
    decay = tl.exp(log_decay)
    slow = log_decay > SLOW
    rest = tl.where(slow, decay - 1.0, decay).to(ACC)
    new = rest * state + added
    return tl.where(slow, state + new, new)


@triton.jit
def state_offsets(n, p, P, N):
    """Where the entries of a state `(p, n)` lie in memory, as a tile (n, p), and which exist."""
    return p[None, :] * N + n[:, None], (p < P)[None, :] & (n < N)[:, None]
