# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
"""Kernels of the recurrence with a limit on the norm of the state: see `longrnn.ops.ssd.rescale`.

    ĥ_t = a_t h_{t−1} + u_t,  u_t = gain_t x_t B_tᵀ,  h_t = s_t ĥ_t,  s_t = min(1, limit / ‖ĥ_t‖)

`limit` finds the scales s_t of all tokens and folds them into the gains and log decays, so that
`scan` computes y. `limited_by_token` computes heads again whose squares leave the range of float32
or that are not finite, as the definition states it and in float64.

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


@triton.jit(do_not_specialize=VARYING)
def limit(
    x, gain, log_decay, B, limits, first, before, final, gain_out, log_decay_out, trouble,
    time, segment, x_row, x_token, B_row, B_token, tolerance,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Scaled gains and log decays of one head, and its states at the starts of segments.

    Args:
        limits: `(h,)` float64.
        first: the state before the first token, `(heads, p, n)`.
        before: the state before each segment, `(segments, heads, p, n)`.
        final: the state after the last token, `(heads, p, n)`; meanwhile the current state.
        gain_out: `(b, t, h)`.
        log_decay_out: `(b, t, h)`.
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
    most = largest * largest
    segments = tl.cdiv(time, segment)
    wrong = segments
    now = first + head * (P * N)
    square = tl.zeros((), ACC)
    for tile in range(tl.cdiv(P, BP)):
        offsets, exists = state_offsets(n, tile * BP + tl.arange(0, BP), P, N)
        state = tl.load(now + offsets, mask=exists, other=0.0)
        square += tl.sum(tl.sum(state * state, 1), 0)
        tl.store(final + head * (P * N) + offsets, state, mask=exists)
    now = final + head * (P * N)
    for k in range(tl.cdiv(time, L)):
        start = k * L + tl.zeros((), tl.int64)
        number = start // segment
        left = tl.minimum(time - start, L).to(tl.int32)
        row = (b * time + start) * H + h
        given = tl.load(log_decay + row + j * H, mask=j < left, other=0.0).to(tl.float64)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        log_decays = tl.where(given < LEAST, LEAST, given)

        # Products of the inputs with one another and with the state at the start.
        alike, with_state = tl.zeros((L, L), ACC), tl.zeros((L,), ACC)
        tl.debug_barrier()  # all threads have stored the state
        for tile in range(tl.cdiv(P, BP)):
            p = tile * BP + tl.arange(0, BP)
            offsets, exists = state_offsets(n, p, P, N)
            state = tl.load(now + offsets, mask=exists, other=0.0)
            if start % segment == 0:
                at = before + (number * heads + head) * (P * N)
                tl.store(at + offsets, state, mask=exists)
            xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
            alike += product(xs, tl.trans(xs), ACC, Bs.dtype, MODE)
            read = product(Bs, state, ACC, Bs.dtype, MODE)
            with_state += tl.sum(read * xs.to(ACC), 1)
        alike = alike * gains[:, None] * gains[None, :]
        with_state *= gains
        both = product(Bs, tl.trans(Bs), ACC, Bs.dtype, MODE)
        diagonal = j[:, None] == j[None, :]
        square_x = tl.sum(tl.where(diagonal, alike, 0.0), 1)
        square_B = tl.sum(tl.where(diagonal, both, 0.0), 1)
        own = square_x * square_B
        gram = tl.where(j[:, None] > j[None, :], alike * both, 0.0)
        # False where anything is NaN.
        fine = (tl.sum(square_x, 0) <= MAX_X) & (tl.sum(square_B, 0) <= MAX_B)
        fine = fine & (square <= MAX_STATE) & usual
        fine = fine & (tl.sum((given <= 0.0).to(tl.int32), 0) == L)
        wrong = tl.where(fine, wrong, tl.minimum(wrong, number.to(tl.int32)))

        a = tl.exp(2.0 * log_decays).to(ACC)
        scale = tl.full((L,), 1.0, ACC)
        change = tl.full((), 1.0, ACC)
        sweeps = 0
        while (change > tolerance) & (sweeps < L):
            logs = tl.log(scale.to(tl.float64))
            # Up to a token, without its own scale; the state at its own token has one.
            total = tl.cumsum(log_decays + logs, 0) - logs
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
        gains *= scale
        tl.store(gain_out + row + j * H, gains, mask=j < left)
        scaled = given + tl.log(scale.to(tl.float64))
        scaled = scaled.to(log_decay_out.dtype.element_ty)  # as `scan` will read it
        tl.store(log_decay_out + row + j * H, scaled, mask=j < left)
        high, low, total = running_sums(scaled, ACC)
        weight = decay_to_end(high, low, total, ACC) * gains
        square = tl.zeros((), ACC)
        for tile in range(tl.cdiv(P, BP)):
            p = tile * BP + tl.arange(0, BP)
            offsets, exists = state_offsets(n, p, P, N)
            state = tl.load(now + offsets, mask=exists, other=0.0)
            xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
            weighted = xs.to(ACC) * weight[:, None]
            added = product(tl.trans(Bs), weighted, ACC, Bs.dtype, MODE)
            state = decayed(state, added, total, ACC)
            square += tl.sum(tl.sum(state * state, 1), 0)
            tl.store(now + offsets, state, mask=exists)
    tl.store(trouble + head, wrong)


@triton.jit(do_not_specialize=VARYING)
def limited_by_token(
    x, gain, log_decay, B, C, limits, before, final, y, beyond, trouble,
    time, segment, heads, segments, x_row, x_token, B_row, B_token, C_row, C_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token after the other, from the first segment with trouble, in float64.

    Args:
        gain: of the inputs, without scales, as log_decay.
        limits: `(h,)` float64; a head with infinity has none.
        before: the state before each segment, `(segments, heads, p, n)`.
        final: the state after the last token.
        beyond: `(heads,)` int32, from `limit`.
        trouble: `(heads, segments · TILES)` int32, from `scan`.
    """
    ACC: tl.constexpr = before.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    entry = tl.arange(0, BLOCK)
    some = entry < segments * TILES
    bad = tl.load(trouble + head * segments * TILES + entry, mask=some, other=0)
    number = tl.min(tl.where(bad != 0, entry // TILES, segments), 0)
    number = tl.minimum(number, tl.load(beyond + head))
    if number < segments:
        largest = tl.load(limits + h)
        n, p = tl.arange(0, BN), tl.arange(0, BP)
        offsets, exists = state_offsets(n, p, P, N)
        begin = number.to(tl.int64)
        at = before + (begin * heads + head) * (P * N)
        state = tl.load(at + offsets, mask=exists, other=0.0).to(tl.float64)
        for t in range(begin * segment, time.to(tl.int64)):
            row = (b * time + t) * H + h
            g = tl.load(gain + row).to(tl.float64)
            log_of_decay = tl.load(log_decay + row).to(tl.float64)
            x_at = x + b * x_row + t * x_token + h * P
            B_at = B + b * B_row + t * B_token + h // R * N
            C_at = C + b * C_row + t * C_token + h // R * N
            x_t = tl.load(x_at + p, mask=p < P, other=0.0).to(tl.float64) * g
            B_t = tl.load(B_at + n, mask=n < N, other=0.0).to(tl.float64)
            C_t = tl.load(C_at + n, mask=n < N, other=0.0).to(ACC)
            added = x_t[None, :] * B_t[:, None]
            # After a log decay of −∞ nothing is kept, NaN included.
            kept = tl.exp(log_of_decay) * state
            state = tl.where(log_of_decay == float("-inf"), added, kept + added)
            state = tl.where(exists, state, 0.0)
            if largest < float("inf"):
                # The square of a float64 above 1e154 overflows: divide by the largest entry first.
                unit = tl.max(tl.max(tl.abs(state), 1), 0)
                unit = tl.where((unit > 0) & (unit < float("inf")), unit, 1.0)
                part = state / unit
                norm = unit * tl.sqrt(tl.sum(tl.sum(part * part, 1), 0))
                # Not a minimum, which would drop NaN: a state that is not finite becomes NaN or 0.
                scale = largest / tl.where(norm <= largest, largest, norm)
                state = tl.where(exists, state * scale, 0.0)
            # A state has the digits of its dtype between two tokens.
            state = state.to(ACC).to(tl.float64)
            read = tl.where(exists, state.to(ACC) * C_t[:, None], 0.0)
            tl.store(y + row * P + p, tl.sum(read, 0).to(y.dtype.element_ty), mask=p < P)
        tl.store(final + head * (P * N) + offsets, state.to(ACC), mask=exists)
