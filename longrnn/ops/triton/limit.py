# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
"""Kernels of the recurrence with a limit on the norm of the state: see `longrnn.ops.ssd.rescale`.

    ĥ_t = a_t h_{t−1} + u_t,  u_t = gain_t x_t B_tᵀ,  h_t = s_t ĥ_t,  s_t = min(1, limit / ‖ĥ_t‖)

`limit` finds the scales s_t of all tokens; with gains and decays times these, `scan` computes y.
Heads whose squares leave the range of float32 or that are not finite are computed again in
`longrnn.ops.triton.limit_by_token`. The gradient is in `longrnn.ops.triton.limit_gradient`.

Notable choices:
- With v_t = ‖ĥ_t‖² and ⟨ĥ_t, u_t⟩ from the Gram matrix of a chunk, v_t = a_t² min(limit², v_{t−1})
  + 2 a_t ⟨h_{t−1}, u_t⟩ + ‖u_t‖². Given the cross terms these are maps v → min(c, a v + b), whose
  composition has the same form: one associative scan finds all of them.
- The cross terms depend on the scales of earlier tokens. Starting from scales of 1, a sweep
  computes cross terms and then scales, until no scale changes. A scale depends on earlier ones
  alone, so L sweeps are always enough; a few are usual, and one where no state reaches its limit.
- The state lies in memory between chunks, where the caches hold it, and is read in tiles of its
  channels: beside the Gram matrices it would not fit into the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrnn.ops.triton.chunk import (
    LEAST,
    decay_between,
    decay_to_end,
    decayed,
    load_tile,
    running_sums,
    state_offsets,
)
from longrnn.ops.triton.device import product
from longrnn.ops.triton.scan import VARYING

# The largest sums of squares of gain · x, of B and of a state, and the smallest limit, with which
# float32 holds all products; as in `longrnn.ops.ssd.rescale`.
MAX_X, MAX_B, MAX_STATE = tl.constexpr(1e24), tl.constexpr(1e12), tl.constexpr(1e36)
MIN_LIMIT = tl.constexpr(1e-6)
# Above every square that is not in trouble.
FREE = tl.constexpr(1e37)


@triton.jit
def _clamped(a1, b1, c1, a2, b2, c2):
    """v → min(c2, a2 min(c1, a1 v + b1) + b2), again of the form v → min(c, a v + b), as a2 ≥ 0."""
    return a1 * a2, a2 * b1 + b2, tl.minimum(c2, a2 * c1 + b2)


@triton.jit
def _copy_state(source, target, n, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr):
    """Copies a state in tiles of its channels, and returns the square of its norm."""
    square = tl.zeros((), source.dtype.element_ty)
    for tile in range(tl.cdiv(P, BP)):
        offsets, exists = state_offsets(n, tile * BP + tl.arange(0, BP), P, N)
        state = tl.load(source + offsets, mask=exists, other=0.0)
        square += tl.sum(tl.sum(state * state, 1), 0)
        tl.store(target + offsets, state, mask=exists)
    return square


@triton.jit
def chunk_of_x(x, token, j, p, left, P: tl.constexpr):
    """x of a chunk at some channels, `(j, p)`, from a pointer to its first entry."""
    inside = (j < left)[:, None] & (p < P)[None, :]
    return tl.load(x + (j[:, None] * token + p[None, :]), mask=inside, other=0.0)


@triton.jit
def _input_products(
    x, x_token, now, copy, copies, Bs, gains, j, n, left,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """gain_i x_i · gain_j x_j `(i, j)`, and ⟨u_j, state⟩ `(j,)`; copies the state.

    Args:
        x: pointer to the first entry of the chunk.
        x_token: distance of two tokens.
        now: pointer to the state.
        copy: where it is copied to, if `copies`.
        copies: see above.
        Bs: B of the chunk.
        gains: of the chunk.
        j: numbers of the tokens.
        n: numbers of the entries of B.
        left: how many tokens exist.
        P: see `longrnn.ops.triton.scan`, as the others.
        N: see above.
        BP: see above.
        MODE: see above.
    """
    ACC: tl.constexpr = now.dtype.element_ty
    L: tl.constexpr = j.shape[0]
    alike, with_state = tl.zeros((L, L), ACC), tl.zeros((L,), ACC)
    for tile in range(tl.cdiv(P, BP)):
        p = tile * BP + tl.arange(0, BP)
        offsets, exists = state_offsets(n, p, P, N)
        state = tl.load(now + offsets, mask=exists, other=0.0)
        if copies:
            tl.store(copy + offsets, state, mask=exists)
        xs = chunk_of_x(x, x_token, j, p, left, P)
        alike += product(xs, tl.trans(xs), ACC, Bs.dtype, MODE)
        read = product(Bs, state, ACC, Bs.dtype, MODE)
        with_state += tl.sum(read * xs.to(ACC), 1)
    return alike * gains[:, None] * gains[None, :], with_state * gains


@triton.jit
def _in_range(square_x, square_B, square, log_decays, L: tl.constexpr):
    """Whether float32 holds all products; false where anything is NaN or a decay above 1."""
    fine = (tl.sum(square_x, 0) <= MAX_X) & (tl.sum(square_B, 0) <= MAX_B)
    return fine & (square <= MAX_STATE) & (tl.sum((log_decays <= 0.0).to(tl.int32), 0) == L)


@triton.jit
def _chunk_scales(
    gram, with_state, own, log_decays, square, largest, j, left, tolerance,
    ACC: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """The scales of a chunk, `(j,)`, by sweeps.

    Args:
        gram: ⟨u_i, u_j⟩ below the diagonal, 0 elsewhere.
        with_state: ⟨u_j, state⟩.
        own: ‖u_j‖².
        log_decays: `(j,)`.
        square: ‖state‖².
        largest: the limit.
        j: numbers of the tokens.
        left: how many of them exist.
        tolerance: see `limit`.
        ACC: dtype of the state.
        L: tokens of a chunk.
    """
    most = largest * largest
    given = log_decays.to(tl.float64)
    given = tl.where(given < LEAST, LEAST, given)
    a = tl.exp(2.0 * given).to(ACC)
    scale = tl.full((L,), 1.0, ACC)
    change = tl.full((), 1.0, ACC)
    sweeps = 0
    while (change > tolerance) & (sweeps < L):
        logs = tl.log(scale.to(tl.float64))
        # Up to a token, without its own scale; the state at its own token has one.
        total = tl.cumsum(given + logs, 0) - logs
        high = total.to(ACC)
        low = (total - high.to(tl.float64)).to(ACC)
        # From u_i to token t: the decays over (i, t] and the scales over [i, t).
        cross = tl.sum(gram * decay_between(high, low, j), 1) + with_state * tl.exp(high)
        add = 2.0 * cross + own
        # The state before the first token of a chunk is within its limit, or the caller's.
        cap = tl.where(j == 0, FREE, a * most + add)
        slope, offset, ceiling = tl.associative_scan((a, add, cap), 0, _clamped)
        squares = tl.minimum(ceiling, slope * square + offset)
        above = (j < left) & (squares > most)
        new = tl.where(above, largest / tl.sqrt(tl.where(above, squares, 1.0)), 1.0)
        change = tl.max(tl.abs(new - scale) / new, 0)
        scale = new
        sweeps += 1
    return scale


@triton.jit
def _advance(
    x, x_token, now, Bs, weight, total, j, n, left,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Replaces the state in memory by the one after the chunk; returns its square.

    Args:
        x: pointer to the first entry of the chunk.
        x_token: distance of two tokens.
        now: pointer to the state.
        Bs: B of the chunk.
        weight: what x of each token is multiplied by.
        total: the sum of the log decays, float64.
        j: numbers of the tokens.
        n: numbers of the entries of B.
        left: how many tokens exist.
        P: see `longrnn.ops.triton.scan`, as the others.
        N: see above.
        BP: see above.
        MODE: see above.
    """
    ACC: tl.constexpr = now.dtype.element_ty
    square = tl.zeros((), ACC)
    for tile in range(tl.cdiv(P, BP)):
        p = tile * BP + tl.arange(0, BP)
        offsets, exists = state_offsets(n, p, P, N)
        state = tl.load(now + offsets, mask=exists, other=0.0)
        weighted = chunk_of_x(x, x_token, j, p, left, P).to(ACC) * weight[:, None]
        added = product(tl.trans(Bs), weighted, ACC, Bs.dtype, MODE)
        state = decayed(state, added, total, ACC)
        square += tl.sum(tl.sum(state * state, 1), 0)
        tl.store(now + offsets, state, mask=exists)
    return square


@triton.jit(do_not_specialize=VARYING)
def limit(
    x, gain, log_decay, B, limits, first, before, final, scales, log_decay_out, trouble,
    time, segment, x_row, x_token, B_row, B_token, tolerance,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Scales and scaled log decays of one head, and its states at the starts of segments.

    Args:
        limits: `(h,)` float64.
        first: the state before the first token, `(heads, p, n)`.
        before: the state before each segment, `(segments, heads, p, n)`.
        final: the state after the last token, `(heads, p, n)`; meanwhile the current state.
        scales: `(b, t, h)`.
        log_decay_out: of decays times scales, `(b, t, h)`.
        trouble: `(heads,)` int32, the first segment in which squares leave the range of float32.
        tolerance: the largest change of a scale, relative to it, after which sweeps end.
    """
    ACC: tl.constexpr = first.dtype.element_ty
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    b, h = head // H, head % H
    j, n = tl.arange(0, L), tl.arange(0, BN)
    largest = tl.load(limits + h)
    usual = largest >= MIN_LIMIT
    largest = tl.minimum(largest, 1e18).to(ACC)
    wrong = tl.cdiv(time, segment)
    now = final + head * (P * N)
    square = _copy_state(first + head * (P * N), now, n, P, N, BP)
    for k in range(tl.cdiv(time, L)):
        start = k * L + tl.zeros((), tl.int64)
        number = start // segment
        left = tl.minimum(time - start, L).to(tl.int32)
        row = (b * time + start) * H + h
        given = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        x_at = x + b * x_row + start * x_token + h * P
        tl.debug_barrier()  # all threads have stored the state
        copy = before + (number * heads + head) * (P * N)
        alike, with_state = _input_products(
            x_at, x_token, now, copy, start % segment == 0, Bs, gains, j, n, left, P, N, BP, MODE
        )
        both = product(Bs, tl.trans(Bs), ACC, Bs.dtype, MODE)
        diagonal = j[:, None] == j[None, :]
        square_x = tl.sum(tl.where(diagonal, alike, 0.0), 1)
        square_B = tl.sum(tl.where(diagonal, both, 0.0), 1)
        gram = tl.where(j[:, None] > j[None, :], alike * both, 0.0)
        fine = usual & _in_range(square_x, square_B, square, given, L)
        wrong = tl.where(fine, wrong, tl.minimum(wrong, number.to(tl.int32)))

        own = square_x * square_B
        scale = _chunk_scales(
            gram, with_state, own, given, square, largest, j, left, tolerance, ACC, L
        )
        # Read again rather than kept in registers.
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC) * scale
        scaled = (given.to(tl.float64) + tl.log(scale.to(tl.float64))).to(given.dtype)
        tl.store(scales + row + j * H, scale, mask=j < left)
        tl.store(log_decay_out + row + j * H, scaled, mask=j < left)
        high, low, total = running_sums(scaled, ACC)  # rounded as `scan` will read it
        weight = decay_to_end(high, low, total, ACC) * gains
        square = _advance(x_at, x_token, now, Bs, weight, total, j, n, left, P, N, BP, MODE)
    tl.store(trouble + head, wrong)
