# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
"""Kernels of the equations for τ in `longrnn.ops.triton.limit_gradient`, one chunk per program.

Notable choices:
- The inverse is found from the inverses of diagonal blocks of 1, 2, 4, … tokens. A series of powers
  of A would need the same products, but its terms grow beyond all digits before they cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrnn.ops.triton.chunk import decay_between, load_tile, running_sums, state_offsets
from longrnn.ops.triton.device import product
from longrnn.ops.triton.scan import VARYING


@triton.jit
def inverse_of(system, j, ACC: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr):
    """The inverse of a lower triangle `(L, L)` whose diagonal is 1; the diagonal is not read."""
    inverse = (j[:, None] == j[None, :]).to(ACC)
    size = 1
    while size < L:
        # [[X, 0], [Y, Z]] has the inverse [[X', 0], [−Z' Y X', Z']].
        row, column = j[:, None] // size, j[None, :] // size
        below = tl.where((row % 2 == 1) & (column == row - 1), system, 0.0)
        inverse -= product(product(inverse, below, ACC, ACC, MODE), inverse, ACC, ACC, MODE)
        size *= 2
    return inverse


@triton.jit(do_not_specialize=VARYING)
def limit_outputs(
    x, gain, log_decay, scales, B, C, grad_y, before, rho,
    time, heads, skip, x_row, x_token, B_row, B_token, C_row, C_token, y_row, y_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The part of ρ that the outputs of one chunk cause, for one head; see `limit_system`.

    Args:
        gain: with the scales, as log_decay.
        scales: `(b, t, h)`.
        before: S of every chunk, `(chunks, heads, p, n)`.
        rho: where it is written, `(b, t, h)`.
        skip: tokens before the first of these chunks.
    """
    ACC: tl.constexpr = rho.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    head, start = program % heads, skip + program // heads * L
    b, h = head // H, head % H
    j, n = tl.arange(0, L), tl.arange(0, BN)
    left = tl.minimum(time - start, L).to(tl.int32)
    row = (b * time + start) * H + h
    rescaled = tl.load(scales + row + j * H, mask=j < left, other=1.0) < 1.0
    if tl.sum(rescaled.to(tl.int32), 0) > 0:
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        Cs = load_tile(C, b, start, h // R * N, C_row, C_token, j, n, left, N)
        terms = product(Cs, tl.trans(Bs), ACC, Bs.dtype, MODE)
        alike, from_start = tl.zeros((L, L), ACC), tl.zeros((L,), ACC)
        for k in range(tl.cdiv(P, BP)):
            p = k * BP + tl.arange(0, BP)
            offsets, exists = state_offsets(n, p, P, N)
            xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
            dys = load_tile(grad_y, b, start, h * P, y_row, y_token, j, p, left, P)
            alike += product(dys, tl.trans(xs), ACC, Bs.dtype, MODE)
            S = tl.load(before + program * (P * N) + offsets, mask=exists, other=0.0).to(ACC)
            from_start += tl.sum(product(Cs, S, ACC, Bs.dtype, MODE) * dys.to(ACC), 1)
        log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        high, low, _ = running_sums(log_decays, ACC)
        terms *= alike * decay_between(high, low, j) * gains[None, :]
        # The terms of outputs at t or later and of inputs up to t.
        known = tl.where(j[:, None] >= j[None, :], tl.cumsum(terms, 1), 0.0)
        found = tl.sum(known, 0) + tl.cumsum(from_start * tl.exp(high), 0, reverse=True)
        tl.store(rho + row + j * H, found, mask=j < left)


@triton.jit(do_not_specialize=VARYING)
def limit_system(
    x, gain, log_decay, scales, B, before, with_start, contributions, inverse,
    time, heads, skip, x_row, x_token, B_row, B_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The equations for τ in one chunk of one head; nothing is written if no state is rescaled.

    Args:
        gain: with the scales, as log_decay.
        scales: `(b, t, h)`.
        before: S of every chunk, `(chunks, heads, p, n)`.
        with_start: ⟨h_t, S⟩, `(b, t, h)`.
        contributions: E, `(chunks, heads, L, L)`.
        inverse: the transposed inverse of A, 0 where no state is rescaled, likewise.
        skip: tokens before the first of these chunks.
    """
    ACC: tl.constexpr = with_start.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    head, start = program % heads, skip + program // heads * L
    b, h = head // H, head % H
    j, n = tl.arange(0, L), tl.arange(0, BN)
    left = tl.minimum(time - start, L).to(tl.int32)
    row = (b * time + start) * H + h
    rescaled = tl.load(scales + row + j * H, mask=j < left, other=1.0) < 1.0
    if tl.sum(rescaled.to(tl.int32), 0) > 0:
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        gram = product(Bs, tl.trans(Bs), ACC, Bs.dtype, MODE)
        alike, of_start, square = tl.zeros((L, L), ACC), tl.zeros((L,), ACC), tl.zeros((), ACC)
        for k in range(tl.cdiv(P, BP)):
            p = k * BP + tl.arange(0, BP)
            offsets, exists = state_offsets(n, p, P, N)
            xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
            alike += product(xs, tl.trans(xs), ACC, Bs.dtype, MODE)
            S = tl.load(before + program * (P * N) + offsets, mask=exists, other=0.0).to(ACC)
            of_start += tl.sum(product(Bs, S, ACC, Bs.dtype, MODE) * xs.to(ACC), 1)
            square += tl.sum(tl.sum(S * S, 1), 0)
        log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        high, low, _ = running_sums(log_decays, ACC)
        gram *= alike * gains[:, None] * gains[None, :]
        of_start *= gains
        since_start, between = tl.exp(high), decay_between(high, low, j)
        states = product(between, gram, ACC, ACC, MODE) + since_start[:, None] * of_start[None, :]
        states *= between
        table = program * (L * L) + j[:, None] * L + j[None, :]
        tl.store(contributions + table, states)
        start_part = tl.sum(between * of_start[None, :], 1) + since_start * square
        tl.store(with_start + row + j * H, start_part, mask=j < left)

        system = tl.cumsum(states, 1) + (start_part * since_start)[:, None]
        squares = tl.sum(tl.where(j[:, None] == j[None, :], system, 0.0), 0)
        squares = tl.where(rescaled, squares, 1.0)
        both = rescaled[:, None] & rescaled[None, :] & (j[:, None] >= j[None, :])
        found = inverse_of(tl.where(both, system / squares[None, :], 0.0), j, ACC, L, MODE)
        tl.store(inverse + table, tl.where(both, found / squares[:, None], 0.0))
