# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
"""Kernels of the gradient of the recurrence, one chunk per program.

With W_ij = (C_i · B_j) exp(Σ log_decay over (j, i]) inside a chunk, S the state before it, D the
gradient of the state after it, e_j the decay from j to its end and s_i that from its start to i,

    du_j = Σ_i W_ij dy_i + e_j D B_j,     dx_j = gain_j du_j,     dgain_j = du_j · x_j,
    dB_j = Σ_i dW_ij C_i + e_j gain_j x_j D,     dC_i = Σ_j dW_ij B_j + s_i dy_i S,

where dW_ij = (dy_i · x_j) gain_j exp(Σ log_decay over (j, i]). The gradient of a log decay is the
sum of all terms whose decay contains it, all of them inside its chunk once S and D are known.

Notable choices:
- The heads of a group are added up in registers and then in a fixed order, without atomic
  operations: two runs give the same bits.
- A term whose decay is 1 (j = i) is left out of the gradient of the log decays before summing. As
  the difference of two sums it would leave its rounding error to heads that forget at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrnn.ops.triton.chunk import (
    chunk_of_program,
    decay_between,
    decay_to_end,
    load_tile,
    running_sums,
    state_offsets,
)
from longrnn.ops.triton.device import product
from longrnn.ops.triton.scan import VARYING


@triton.jit
def _crossing(terms, from_start, to_end):
    """The terms whose decay contains that of token t, `(t,)` float64.

    Args:
        terms: from token j to i > j, `(i, j)`; 0 elsewhere.
        from_start: from the start of the chunk to a token, `(i,)`.
        to_end: from a token to the end of the chunk, `(j,)`.
    """
    # j < t ≤ i: those that end at t or later, less those that begin there.
    crossing = from_start.to(tl.float64) + tl.sum(terms, 1) - tl.sum(terms, 0)
    ending = to_end.to(tl.float64)
    return tl.cumsum(crossing, 0, reverse=True) + (tl.cumsum(ending, 0) - ending)


@triton.jit
def _less_tau(terms, from_start, taus, with_start, table, j):
    """`terms` and `from_start` of `_crossing`, less those of τ.

    Args:
        terms: without those of τ.
        from_start: likewise, without the decay.
        taus: `(j,)`.
        with_start: pointers to ⟨h_t, S⟩ of each token.
        table: pointer to E of the chunk.
        j: numbers of the tokens.
    """
    L: tl.constexpr = j.shape[0]
    from_start -= taus * tl.load(with_start, mask=taus != 0.0, other=0.0)
    earlier = (taus != 0.0)[:, None] & (j[:, None] > j[None, :])
    entries = tl.load(table + (j[:, None] * L + j[None, :]), mask=earlier, other=0.0)
    return terms - taus[:, None] * entries, from_start


@triton.jit(do_not_specialize=VARYING)
def grad_x(
    x, gain, log_decay, B, C, grad_y, before, after, dx, dgain, dlog_decay,
    scales, tau, with_start, contributions, taken,
    time, heads, skip, x_row, x_token, B_row, B_token, C_row, C_token, y_row, y_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """The gradients of x, gain and log_decay in one chunk of one head.

    Args:
        before: S of every chunk, `(chunks, heads, p, n)`.
        after: D of every chunk.
        dx: `(b, t, h, p)`, contiguous.
        dgain: `(b, t, h)`.
        dlog_decay: `(b, t, h)`.
        scales: LIMITED: see `longrnn.ops.triton.limit_gradient`, as the next four; dgain is then
            that of the gain without its scale.
        tau: see above.
        with_start: see above.
        contributions: see above.
        taken: see above.
        skip: tokens before the first of these chunks.
    """
    ACC: tl.constexpr = dgain.dtype.element_ty
    program, b, h, start, left = chunk_of_program(time, heads, skip, H, L)
    j, n = tl.arange(0, L), tl.arange(0, BN)
    row = (b * time + start) * H + h
    log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
    gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
    high, low, total = running_sums(log_decays, ACC)
    Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
    Cs = load_tile(C, b, start, h // R * N, C_row, C_token, j, n, left, N)
    weights = product(Cs, tl.trans(Bs), ACC, Bs.dtype, MODE) * decay_between(high, low, j)
    if LIMITED:
        taus = tl.load(tau + row + j * H, mask=j < left, other=0.0)
        written = tl.where(tl.sum((taus != 0.0).to(tl.int32), 0) > 0, left, 0)

    # Sums over the channels: dy_i · x_j, and what the gradients of the decays and gains need.
    alike = tl.zeros((L, L), ACC)
    from_start, to_end, inner = tl.zeros((L,), ACC), tl.zeros((L,), ACC), tl.zeros((L,), ACC)
    through = tl.zeros((), ACC)
    for k in range(tl.cdiv(P, BP)):
        p = k * BP + tl.arange(0, BP)
        offsets, exists = state_offsets(n, p, P, N)
        offsets += program * (P * N)
        xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
        dys = load_tile(grad_y, b, start, h * P, y_row, y_token, j, p, left, P)
        alike += product(dys, tl.trans(xs), ACC, Bs.dtype, MODE)
        S = tl.load(before + offsets, mask=exists, other=0.0).to(ACC)
        from_start += tl.sum(product(Cs, S, ACC, Bs.dtype, MODE) * dys.to(ACC), 1)
        D = tl.load(after + offsets, mask=exists, other=0.0).to(ACC)
        through += tl.sum(tl.sum(S * D, 1), 0)
        du = product(Bs, D, ACC, Bs.dtype, MODE) * decay_to_end(high, low, total, ACC)[:, None]
        to_end += tl.sum(du * xs.to(ACC), 1)
        du += product(tl.trans(weights), dys, ACC, Bs.dtype, MODE)
        if LIMITED:
            at = taken + program * (L * P) + (j[:, None] * P + p[None, :])
            known = (j < written)[:, None] & (p < P)[None, :]
            du -= tl.load(at, mask=known, other=0.0)
        inner += tl.sum(du * xs.to(ACC), 1)
        at = dx + row * P + (j[:, None] * (H * P) + p[None, :])
        inside = (j < left)[:, None] & (p < P)[None, :]
        tl.store(at, (du * gains[:, None]).to(dx.dtype.element_ty), mask=inside)
    terms = tl.where(j[:, None] > j[None, :], alike * weights * gains[None, :], 0.0)
    if LIMITED:
        inner *= tl.load(scales + row + j * H, mask=j < left, other=0.0)
        table = contributions + program * (L * L)
        terms, from_start = _less_tau(terms, from_start, taus, with_start + row + j * H, table, j)
    tl.store(dgain + row + j * H, inner, mask=j < left)
    found = _crossing(terms, from_start * tl.exp(high), to_end * gains)
    found += tl.exp(total) * through
    tl.store(dlog_decay + row + j * H, found.to(dlog_decay.dtype.element_ty), mask=j < left)


@triton.jit(do_not_specialize=VARYING)
def grad_bc(
    x, gain, log_decay, B, C, grad_y, before, after, dB, dC,
    time, heads, skip, x_row, x_token, B_row, B_token, C_row, C_token, y_row, y_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The gradients of B and C in one chunk, summed over AT_ONCE heads of one group.

    Args:
        before: S of every chunk, `(chunks, heads, p, n)`.
        after: D of every chunk.
        dB: `(b, t, H / AT_ONCE, n)`, contiguous.
        dC: likewise.
        skip: as for `grad_x`.
    """
    ACC: tl.constexpr = dB.dtype.element_ty
    PARTS: tl.constexpr = H // AT_ONCE
    program = tl.program_id(0).to(tl.int64)
    part, program = program % PARTS, program // PARTS
    rows = heads // H
    b, chunk = program % rows, program // rows
    start = skip + chunk * L
    j, n = tl.arange(0, L), tl.arange(0, BN)
    left = tl.minimum(time - start, L).to(tl.int32)
    grad_weights = tl.zeros((L, L), ACC)
    sum_B, sum_C = tl.zeros((L, BN), ACC), tl.zeros((L, BN), ACC)
    for k in range(AT_ONCE):
        h = part * AT_ONCE + k
        row = (b * time + start) * H + h
        log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        high, low, total = running_sums(log_decays, ACC)
        since_start = tl.exp(high)[:, None]
        until_end = (decay_to_end(high, low, total, ACC) * gains)[:, None]
        alike = tl.zeros((L, L), ACC)
        for tile in range(tl.cdiv(P, BP)):
            p = tile * BP + tl.arange(0, BP)
            offsets = (chunk * heads + b * H + h) * (P * N) + (p[:, None] * N + n[None, :])
            exists = (p < P)[:, None] & (n < N)[None, :]
            xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
            dys = load_tile(grad_y, b, start, h * P, y_row, y_token, j, p, left, P)
            alike += product(dys, tl.trans(xs), ACC, xs.dtype, MODE)
            S = tl.load(before + offsets, mask=exists, other=0.0).to(ACC)
            sum_C += product(dys, S, ACC, xs.dtype, MODE) * since_start
            D = tl.load(after + offsets, mask=exists, other=0.0).to(ACC)
            sum_B += product(xs, D, ACC, xs.dtype, MODE) * until_end
        grad_weights += alike * decay_between(high, low, j) * gains[None, :]
    group = part * AT_ONCE // R
    Bs = load_tile(B, b, start, group * N, B_row, B_token, j, n, left, N)
    Cs = load_tile(C, b, start, group * N, C_row, C_token, j, n, left, N)
    sum_C += product(grad_weights, Bs, ACC, Bs.dtype, MODE)
    sum_B += product(tl.trans(grad_weights), Cs, ACC, Bs.dtype, MODE)
    at = (b * time + start) * (PARTS * N) + part * N + (j[:, None] * (PARTS * N) + n[None, :])
    inside = (j < left)[:, None] & (n < N)[None, :]
    tl.store(dB + at, sum_B, mask=inside)
    tl.store(dC + at, sum_C, mask=inside)
