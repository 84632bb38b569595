# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""Kernels of the recurrence over the last w inputs: see `longrnn.ops.ssd.window`.

The chunks of the carry are the segments of these kernels: S tokens each, w = whole · S + rest. The
window of row r of a segment consists of the segment's own tokens up to r, of the `whole − 1`
segments before it, and of the last S + rest − 1 − r tokens of the pair of segments before those:

    walk     the state that each segment adds, from zero (`longrnn.ops.triton.scan`)
    sliding  the sum over the segments between, before each segment
    edges    the part of y that comes from the pair
    scan     the part of y that comes from the sum between and from the own tokens, added to it

No sum is subtracted from another one: `sliding` keeps two stacks, and `edges` runs backward in
time, so that the tokens that are in the window of all rows of a tile only become more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrnn.ops.triton.chunk import LEAST, decayed, load_tile
from longrnn.ops.triton.device import product

# Numbers that differ from call to call: no kernel is compiled again for them.
OF_SLIDING = ("segments", "complete", "slot", "base", "between", "heads")
OF_EDGES = ("time", "tokens", "span", "rest", "heads")


@triton.jit(do_not_specialize=OF_SLIDING)
def sliding(
    own, ends, front, back, back_decay, first,
    segments, complete, slot, base, between, heads,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over the `between` segments before each segment; changes both stacks in place.

    Args:
        own: what each segment that the call completes adds, `(segments, heads, M)`.
        ends: log decays of the `between + 2` segments before the call, then of the complete ones
            in it, `(…, heads)` float64.
        front: slots of the current block from `base` on, `(slots, heads, M)`.
        back: the sum over the current block, `(heads, M)`.
        back_decay: its log decay, `(heads,)` float64.
        first: the sums, `(segments, heads, M)`.
        segments: of the call, with one that it does not complete.
        complete: how many of them it completes.
        slot: of the first of them.
    """
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < M
    distance = heads.to(tl.int64) * M
    here = head * M + entry
    sum_back = tl.load(back + here, mask=exists, other=0.0)
    decay = tl.load(back_decay + head)
    now = slot + tl.zeros((), tl.int32)
    for i in range(segments):
        at = front + (now - base) * distance + here
        older = tl.load(at, mask=exists, other=0.0)
        before = decayed(older, sum_back, decay, sum_back.dtype)
        tl.store(first + i * distance + here, before, mask=exists)
        if i < complete:
            new = tl.load(own + i * distance + here, mask=exists, other=0.0)
            whole = tl.load(ends + (between + 2 + i).to(tl.int64) * heads + head)
            sum_back = decayed(sum_back, new, whole, sum_back.dtype)
            decay += whole
            tl.store(at, new, mask=exists)
            now += 1
            if now == between:
                # The block is complete: replace its states by sums to its end.
                tl.debug_barrier()  # all threads have stored the states
                total = tl.zeros((), tl.float64)
                for k in range(1, between):
                    total += tl.load(ends + (between + 3 + i - k).to(tl.int64) * heads + head)
                    at = front + (between - 1 - k - base) * distance + here
                    older = tl.load(at, mask=exists, other=0.0)
                    new = decayed(older, new, total, new.dtype)
                    tl.store(at, new, mask=exists)
                tl.debug_barrier()
                sum_back = tl.zeros((BLOCK,), sum_back.dtype)
                decay = tl.zeros((), tl.float64)
                now = tl.zeros((), tl.int32)
    tl.store(back + here, sum_back, mask=exists)
    if tl.program_id(1) == 0:
        tl.store(back_decay + head, decay)


@triton.jit(do_not_specialize=OF_EDGES)
def edges(
    x, gain, log_decay, B, C, to_row, y,
    time, tokens, span, rest, heads, x_row, x_token, B_row, B_token, C_row, C_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The part of y that comes from the pair of segments before those between.

    Args:
        x: `(b, tokens, h, p)`; the pair of segment i starts at token i · span.
        gain: `(b, tokens, h)`.
        log_decay: `(b, tokens, h)`.
        B: `(b, tokens, g, n)`.
        C: `(b, t, g, n)`, t tokens from the start of the first segment.
        to_row: the decay from the end of the pair to each row, `(b, t, h)`.
        y: `(b, t, h, p)`, contiguous.
        time: t.
        span: S, tokens per segment.
        rest: w modulo S.
    """
    ACC: tl.constexpr = to_row.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    b, h = head // H, head % H
    j, n = tl.arange(0, L), tl.arange(0, BN)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    begin = number * span
    rows = tl.minimum(time - begin, span).to(tl.int32)
    # The window of row r begins r tokens after this one.
    oldest = begin + span - rest + 1
    count = tl.cdiv(span + rest, L)
    state, after = tl.zeros((BN, BP), ACC), tl.zeros((), tl.float64)
    for i in range(count):
        k = count - 1 - i
        start = oldest + k * L
        left = tl.minimum(begin + 2 * span - start, L).to(tl.int32)
        at = (b * tokens + start) * H + h + j * H
        wide = tl.load(log_decay + at, mask=j < left, other=0.0).to(tl.float64)
        wide = tl.where(wide < LEAST, LEAST, wide)  # unlike a maximum, this keeps NaN
        total = tl.sum(wide, 0)
        to_end = tl.exp(after + (total - tl.cumsum(wide, 0))).to(ACC)
        weight = to_end * tl.load(gain + at, mask=j < left, other=0.0).to(ACC)
        xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        left = rows - k * L
        if left > 0:
            start = begin + k * L
            Cs = load_tile(C, b, start, h // R * N, C_row, C_token, j, n, left, N)
            scores = product(Cs, tl.trans(Bs), ACC, Bs.dtype, MODE) * weight[None, :]
            scores = tl.where(j[:, None] <= j[None, :], scores, 0.0)
            out = product(scores, xs, ACC, Bs.dtype, MODE)
            out += product(Cs, state, ACC, Bs.dtype, MODE)
            row = (b * time + start) * H + h
            out *= tl.load(to_row + row + j * H, mask=j < left, other=0.0)[:, None]
            inside = (j < left)[:, None] & (p < P)[None, :]
            tl.store(y + row * P + (j[:, None] * (H * P) + p[None, :]), out, mask=inside)
        weighted = xs.to(ACC) * weight[:, None]
        state += product(tl.trans(Bs), weighted, ACC, Bs.dtype, MODE)
        after += total
