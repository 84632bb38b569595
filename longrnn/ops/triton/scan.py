# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""Kernels of the recurrence h_t = exp(log_decay_t) h_{t−1} + gain_t x_t B_tᵀ, y_t = h_t C_t.

Time is cut into segments and segments into chunks of L tokens:

    walk      the state after each segment, from zero; segments run in parallel
    passing   the state before each segment, one segment after the other
    scan      y, chunk after chunk; segments run in parallel
    by_token  the recurrence as it is defined, for heads where `scan` found NaN or infinity

`walk` also computes the states before all chunks, and backward in time their gradients, which the
kernels of `longrnn.ops.triton.scan_gradient` read.

Names of sizes: H heads, R heads per group, P channels per head, N numbers of state per channel;
BP and BN are sides of tiles. A program of `walk`, `scan` and `by_token` computes BP channels of one
head of one row; `heads` counts the heads of all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrnn.ops.triton.chunk import (
    decay_between,
    decay_to_end,
    decayed,
    load_tile,
    running_sums,
    state_offsets,
)
from longrnn.ops.triton.device import product

# Numbers that differ from call to call: no kernel is compiled again for them.
VARYING = ("time", "segment", "heads", "segments", "skip")


@triton.jit(do_not_specialize=VARYING)
def walk(
    x, gain, log_decay, B, first, every, last, total_out,
    time, segment, heads, skip, x_row, x_token, B_row, B_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
    REVERSE: tl.constexpr, FROM_ZERO: tl.constexpr, EVERY: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """States of one segment, chunk after chunk.

    Args:
        x: `(b, t, h, p)`; REVERSE: the gradient of y.
        gain: `(b, t, h)`; not read where REVERSE.
        log_decay: `(b, t, h)`.
        B: `(b, t, g, n)`; REVERSE: C.
        first: state before each segment, `(segments, heads, p, n)`; REVERSE: the gradient of the
            state after it. Not read where FROM_ZERO.
        every: EVERY: the state before each chunk, `(chunks, heads, p, n)`; REVERSE: the gradient of
            the state after it.
        last: LAST: the state after each segment; REVERSE: the gradient of the state before it.
        total_out: LAST: the sum of the log decays of each segment, `(segments, heads)` float64.
        skip: tokens before the first of these segments, whole segments.
    """
    ACC: tl.constexpr = last.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    b, h = head // H, head % H
    j, n = tl.arange(0, L), tl.arange(0, BN)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    offsets, exists = state_offsets(n, p, P, N)
    if FROM_ZERO:
        state = tl.zeros((BN, BP), ACC)
    else:
        state = tl.load(first + program * (P * N) + offsets, mask=exists, other=0.0)
    whole = tl.zeros((), tl.float64)
    begin = skip + number * segment
    end = tl.minimum(begin + segment, time)
    count = tl.cdiv(end - begin, L).to(tl.int32)
    for k in range(count):
        start = begin + (count - 1 - k if REVERSE else k) * L
        left = tl.minimum(end - start, L).to(tl.int32)
        if EVERY:
            at = every + ((start - skip) // L * heads + head) * (P * N)
            tl.store(at + offsets, state.to(every.dtype.element_ty), mask=exists)
        row = (b * time + start) * H + h
        log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        high, low, total = running_sums(log_decays, ACC)
        if REVERSE:
            weight = tl.exp(high)
        else:
            gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
            weight = decay_to_end(high, low, total, ACC) * gains
        weighted = xs.to(ACC) * weight[:, None]
        added = product(tl.trans(Bs), weighted, ACC, Bs.dtype, MODE)
        state = decayed(state, added, total, ACC)
        whole += total
    if LAST:
        tl.store(last + program * (P * N) + offsets, state, mask=exists)
        tl.store(total_out + program, whole)


@triton.jit(do_not_specialize=VARYING)
def passing(
    added, total, state, final, segments, heads,
    M: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replaces the state that each segment adds by the state before it, in place.

    Args:
        added: `(segments, heads, M)`, from `walk`.
        total: `(segments, heads)` float64.
        state: before the first segment, `(heads, M)`; REVERSE: the gradient of the final state.
        final: after the last segment; REVERSE: the gradient of the first state.
    """
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < M
    now = tl.load(state + head * M + entry, mask=exists, other=0.0)
    for k in range(segments):
        at = (segments - 1 - k if REVERSE else k) * heads.to(tl.int64) + head
        new = tl.load(added + at * M + entry, mask=exists, other=0.0)
        tl.store(added + at * M + entry, now, mask=exists)
        now = decayed(now, new, tl.load(total + at), now.dtype)
    tl.store(final + head * M + entry, now, mask=exists)


@triton.jit(do_not_specialize=VARYING)
def scan(
    x, gain, log_decay, B, C, first, final, y, trouble,
    time, segment, heads, x_row, x_token, B_row, B_token, C_row, C_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr, FINAL: tl.constexpr,
    FROM_ZERO: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """y of one segment.

    Args:
        first: the state before each segment, `(segments, heads, p, n)`; not read where FROM_ZERO.
        final: FINAL: the state after the last segment, `(heads, p, n)`.
        y: `(b, t, h, p)`, contiguous; ADD: what it contains is added.
        trouble: `(heads, segments, p tiles)` int32: 1 where y is not finite.
    """
    ACC: tl.constexpr = first.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    b, h = head // H, head % H
    j, n = tl.arange(0, L), tl.arange(0, BN)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    offsets, exists = state_offsets(n, p, P, N)
    if FROM_ZERO:
        state = tl.zeros((BN, BP), ACC)
    else:
        state = tl.load(first + program * (P * N) + offsets, mask=exists, other=0.0)
    # 0 while everything is finite: 0 · NaN and 0 · ∞ are NaN.
    zero = tl.zeros((L, BP), ACC)
    begin = number * segment
    end = tl.minimum(begin + segment, time)
    count = tl.cdiv(end - begin, L).to(tl.int32)
    for k in range(count):
        start = begin + k * L
        left = tl.minimum(end - start, L).to(tl.int32)
        row = (b * time + start) * H + h
        log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        Cs = load_tile(C, b, start, h // R * N, C_row, C_token, j, n, left, N)
        high, low, total = running_sums(log_decays, ACC)

        scores = product(Cs, tl.trans(Bs), ACC, Bs.dtype, MODE) * gains[None, :]
        # Not a product with a decay of 0: the gain or B of a later token may be NaN.
        scores = tl.where(j[:, None] >= j[None, :], scores * decay_between(high, low, j), 0.0)
        out = product(Cs, state, ACC, Bs.dtype, MODE) * tl.exp(high)[:, None]
        xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
        out += product(scores, xs, ACC, Bs.dtype, MODE)
        inside = (j < left)[:, None] & (p < P)[None, :]
        at = y + row * P + (j[:, None] * (H * P) + p[None, :])
        if ADD:
            out += tl.load(at, mask=inside, other=0.0).to(ACC)
        zero += 0.0 * out
        tl.store(at, out.to(y.dtype.element_ty), mask=inside)

        weighted = xs.to(ACC) * (decay_to_end(high, low, total, ACC) * gains)[:, None]
        added = product(tl.trans(Bs), weighted, ACC, Bs.dtype, MODE)
        state = decayed(state, added, total, ACC)
    segments = tl.num_programs(0) // heads
    if FINAL:  # noqa: SIM102 (known when the kernel is compiled)
        if number == segments - 1:
            tl.store(final + head * (P * N) + offsets, state, mask=exists)
    found = tl.sum(tl.sum(zero, 1), 0)
    at = (head * segments + number) * tl.num_programs(1) + tl.program_id(1)
    tl.store(trouble + at, (found != 0.0).to(tl.int32))


@triton.jit(do_not_specialize=VARYING)
def by_token(
    x, gain, log_decay, B, C, first, final, y, trouble,
    time, segment, heads, segments, x_row, x_token, B_row, B_token, C_row, C_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    ALWAYS: tl.constexpr,
):  # fmt: skip
    """One token after the other, from the first segment in which `trouble` is 1 for the head.

    Args:
        first: the state before each segment, `(segments, heads, p, n)`.
        final: the state after the last token.
        trouble: from `scan`, of TILES tiles; BLOCK is at least the entries of one head.
        ALWAYS: from the first token, without reading `trouble`.
    """
    ACC: tl.constexpr = first.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    number = tl.zeros((), tl.int32)
    if not ALWAYS:
        entry = tl.arange(0, BLOCK)
        some = entry < segments * TILES
        bad = tl.load(trouble + head * segments * TILES + entry, mask=some, other=0)
        number = tl.min(tl.where(bad != 0, entry // TILES, segments), 0)
    if number < segments:
        n, p = tl.arange(0, BN), tl.program_id(1) * BP + tl.arange(0, BP)
        offsets, exists = state_offsets(n, p, P, N)
        begin = number.to(tl.int64)
        state = tl.load(first + (begin * heads + head) * (P * N) + offsets, mask=exists, other=0.0)
        for t in range(begin * segment, time.to(tl.int64)):
            row = (b * time + t) * H + h
            g = tl.load(gain + row).to(ACC)
            log_of_decay = tl.load(log_decay + row).to(tl.float64)
            x_at = x + b * x_row + t * x_token + h * P
            B_at = B + b * B_row + t * B_token + h // R * N
            C_at = C + b * C_row + t * C_token + h // R * N
            x_t = tl.load(x_at + p, mask=p < P, other=0.0).to(ACC) * g
            B_t = tl.load(B_at + n, mask=n < N, other=0.0).to(ACC)
            C_t = tl.load(C_at + n, mask=n < N, other=0.0).to(ACC)
            added = x_t[None, :] * B_t[:, None]
            new = decayed(state, added, log_of_decay, ACC)
            # The two parts of a decay have opposite signs: their products with ∞ would be NaN.
            kept = tl.exp(log_of_decay).to(ACC) * state
            new = tl.where(tl.abs(state) < float("inf"), new, kept + added)
            new = tl.where(log_of_decay == float("-inf"), added, new)
            # Entries beyond the tile's edge must not become 0 · ∞.
            state = tl.where(exists, new, 0.0)
            read = tl.where(exists, state * C_t[:, None], 0.0)
            tl.store(y + row * P + p, tl.sum(read, 0).to(y.dtype.element_ty), mask=p < P)
        tl.store(final + head * (P * N) + offsets, state, mask=exists)
