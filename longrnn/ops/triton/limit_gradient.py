# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
"""Kernels of the gradient of the recurrence with a limit on the norm of the state.

    h_t = s_t ĥ_t,  ĥ_t = a_t h_{t−1} + u_t,  s_t = min(1, limit / ‖ĥ_t‖)

With its scales fixed this is the plain recurrence with decays s_t a_t and inputs ũ_t = s_t u_t. The
norm of a rescaled state does not depend on the inputs: of the gradient with respect to h_t, its
part along h_t is removed. So the gradient that all others follow from, as in
`longrnn.ops.triton.scan_gradient`, is

    G_t = dy_t C_tᵀ + s_{t+1} a_{t+1} G_{t+1} − τ_t h_t,

where τ_t is such that ⟨G_t, h_t⟩ = 0 at a token whose state is rescaled, and 0 elsewhere. In a
chunk, let S be the state before it, D_ut the decay over (t, u] and d_u that up to u, all with the
scales, ρ_t the ⟨G_t, h_t⟩ that τ = 0 in the chunk would give, and E_us = D_us ⟨h_u, ũ_s⟩. Then

    Σ_{u ≥ t, rescaled} A_ut τ_u = ρ_t,  A_ut = D_ut ⟨h_u, h_t⟩ = Σ_{s ≤ t} E_us + d_u ⟨h_u, S⟩.

    limit_outputs   the part of ρ that the outputs of a chunk cause
    limit_system    A, and its inverse
    limit_walk      τ, and the gradients of the states after chunks, from the last chunk on
    limit_inputs    the terms of τ in G_t B_t
    grad_x          of `scan_gradient`, less these terms
    grad_bc         of `scan_gradient`
    add_grad_b      the terms of τ in the gradient of B

The first two are in `longrnn.ops.triton.limit_system`. All but `limit_walk` compute chunks in
parallel.

Notable choices:
- A is the lower triangle of a Gram matrix times decays. The entries of its inverse are at most
  2 / limit²: float32 can hold it, and with it a chunk costs the sequential `limit_walk` one product
  of a matrix and a vector.
- Products of two matrices that a kernel computed (tokens by tokens) are in TF32 where those with
  bfloat16 inputs are rounded to bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrnn.ops.triton.chunk import (
    chunk_of_program,
    decay_between,
    decay_to_end,
    decayed,
    load_tile,
    running_sums,
    state_offsets,
)
from longrnn.ops.triton.device import product
from longrnn.ops.triton.limit import chunk_of_x
from longrnn.ops.triton.scan import VARYING


@triton.jit
def _read_gradient(
    now, copy, S, x, x_token, Bs, some, j, n, left,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """⟨G, x_j B_jᵀ⟩ `(j,)` and ⟨G, S⟩ for a gradient G in memory, or 0; copies G.

    Args:
        now: pointer to G.
        copy: where it is copied to.
        S: pointer to the state before the chunk.
        x: pointer to the first entry of the chunk.
        x_token: distance of two tokens.
        Bs: B of the chunk.
        some: whether the products are needed.
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
    with_inputs, with_state = tl.zeros((L,), ACC), tl.zeros((), ACC)
    for tile in range(tl.cdiv(P, BP)):
        p = tile * BP + tl.arange(0, BP)
        offsets, exists = state_offsets(n, p, P, N)
        G = tl.load(now + offsets, mask=exists, other=0.0)
        tl.store(copy + offsets, G.to(copy.dtype.element_ty), mask=exists)
        if some:
            before = tl.load(S + offsets, mask=exists, other=0.0).to(ACC)
            with_state += tl.sum(tl.sum(before * G, 1), 0)
            xs = chunk_of_x(x, x_token, j, p, left, P).to(ACC)
            with_inputs += tl.sum(product(Bs, G, ACC, Bs.dtype, MODE) * xs, 1)
    return with_inputs, with_state


@triton.jit(do_not_specialize=(*VARYING, "chunks"))
def limit_walk(
    x, gain, log_decay, scales, B, C, grad_y, before, after, now, inverse, rho, tau,
    time, heads, skip, chunks,
    x_row, x_token, B_row, B_token, C_row, C_token, y_row, y_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """τ and the gradients of the states after some chunks of one head, from the last one on.

    Args:
        gain: with the scales, as log_decay.
        scales: `(b, t, h)`.
        before: S of every chunk, `(chunks, heads, p, n)`.
        after: the gradient of the state after every chunk, likewise.
        now: the gradient of the state after the last chunk, `(heads, p, n)`; finally that of the
            state before the first one.
        inverse: from `limit_system`.
        rho: from `limit_outputs`.
        tau: τ, `(b, t, h)`.
        skip: tokens before the first of these chunks.
        chunks: how many there are.
    """
    ACC: tl.constexpr = tau.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    j, n = tl.arange(0, L), tl.arange(0, BN)
    now += head * (P * N)
    for k in range(chunks):
        number = chunks - 1 - k
        start = skip + number * L + tl.zeros((), tl.int64)
        program = number * heads.to(tl.int64) + head
        left = tl.minimum(time - start, L).to(tl.int32)
        row = (b * time + start) * H + h
        log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        rescaled = tl.load(scales + row + j * H, mask=j < left, other=1.0) < 1.0
        some = tl.sum(rescaled.to(tl.int32), 0) > 0
        high, low, total = running_sums(log_decays, ACC)
        since_start = tl.exp(high)
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        Cs = load_tile(C, b, start, h // R * N, C_row, C_token, j, n, left, N)

        x_at = x + b * x_row + start * x_token + h * P
        S_at, G_at = before + program * (P * N), after + program * (P * N)
        tl.debug_barrier()  # all threads have stored the gradient
        to_end, through = _read_gradient(
            now, G_at, S_at, x_at, x_token, Bs, some, j, n, left, P, N, BP, MODE
        )

        # The gradient of the state before is less by Σ_s of_inputs_s x_s B_sᵀ + of_start S.
        taus, of_inputs, of_start = tl.zeros((L,), ACC), tl.zeros((L,), ACC), tl.zeros((), ACC)
        if some:
            known = tl.load(rho + row + j * H, mask=j < left, other=0.0)
            known += tl.cumsum(to_end * gains * decay_to_end(high, low, total, ACC), 0)
            known += tl.exp(total).to(ACC) * through
            table = inverse + program * (L * L) + (j[:, None] * L + j[None, :])
            taus = tl.sum(tl.load(table) * known[:, None], 0)
            passed = taus * since_start
            of_inputs = tl.sum(passed[:, None] * decay_between(high, low, j), 0) * gains
            of_start = tl.sum(passed * since_start, 0)
        tl.store(tau + row + j * H, taus, mask=j < left)

        for tile in range(tl.cdiv(P, BP)):
            p = tile * BP + tl.arange(0, BP)
            offsets, exists = state_offsets(n, p, P, N)
            dys = load_tile(grad_y, b, start, h * P, y_row, y_token, j, p, left, P)
            weighted = dys.to(ACC) * since_start[:, None]
            added = product(tl.trans(Cs), weighted, ACC, Bs.dtype, MODE)
            if some:
                weighted = chunk_of_x(x_at, x_token, j, p, left, P).to(ACC) * of_inputs[:, None]
                added -= product(tl.trans(Bs), weighted, ACC, Bs.dtype, MODE)
                added -= of_start * tl.load(S_at + offsets, mask=exists, other=0.0).to(ACC)
            G = tl.load(now + offsets, mask=exists, other=0.0)
            tl.store(now + offsets, decayed(G, added, total, ACC), mask=exists)


@triton.jit
def joint_decays(high, low, taus, j, ACC: tl.constexpr, MODE: tl.constexpr):
    """Σ_u D_ut τ_u D_us `(t, s)`, and the same with the chunk's start in place of s, `(t,)`."""
    between = decay_between(high, low, j)
    weighted = taus[:, None] * between
    with_start = tl.sum(weighted * tl.exp(high)[:, None], 0)
    return product(tl.trans(between), weighted, ACC, ACC, MODE), with_start


@triton.jit(do_not_specialize=VARYING)
def limit_inputs(
    x, gain, log_decay, tau, B, before, taken,
    time, heads, skip, x_row, x_token, B_row, B_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The terms of τ in G_t B_t, with the opposite sign, in one chunk of one head.

    Args:
        gain: with the scales, as log_decay.
        tau: `(b, t, h)`.
        before: S of every chunk, `(chunks, heads, p, n)`.
        taken: the result, `(chunks, heads, L, p)`; not written if all τ are 0.
        skip: tokens before the first of these chunks.
    """
    ACC: tl.constexpr = taken.dtype.element_ty
    program, b, h, start, left = chunk_of_program(time, heads, skip, H, L)
    j, n = tl.arange(0, L), tl.arange(0, BN)
    row = (b * time + start) * H + h
    taus = tl.load(tau + row + j * H, mask=j < left, other=0.0)
    if tl.sum((taus != 0.0).to(tl.int32), 0) > 0:
        log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
        gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
        high, low, _ = running_sums(log_decays, ACC)
        of_inputs, of_start = joint_decays(high, low, taus, j, ACC, MODE)
        Bs = load_tile(B, b, start, h // R * N, B_row, B_token, j, n, left, N)
        of_inputs *= product(Bs, tl.trans(Bs), ACC, Bs.dtype, MODE) * gains[None, :]
        for k in range(tl.cdiv(P, BP)):
            p = k * BP + tl.arange(0, BP)
            offsets, exists = state_offsets(n, p, P, N)
            xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
            S = tl.load(before + program * (P * N) + offsets, mask=exists, other=0.0).to(ACC)
            found = product(Bs, S, ACC, Bs.dtype, MODE) * of_start[:, None]
            found += product(of_inputs, xs, ACC, Bs.dtype, MODE)
            at = taken + program * (L * P) + j[:, None] * P + p[None, :]
            tl.store(at, found, mask=(j < left)[:, None] & (p < P)[None, :])


@triton.jit(do_not_specialize=VARYING)
def add_grad_b(
    x, gain, log_decay, tau, B, before, dB,
    time, heads, skip, x_row, x_token, B_row, B_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Subtracts the terms of τ from the gradient of B in one chunk, for AT_ONCE heads of one group.

    Args:
        gain: with the scales, as log_decay.
        tau: `(b, t, h)`.
        before: S of every chunk, `(chunks, heads, p, n)`.
        dB: of `scan_gradient.grad_bc`, `(b, t, H / AT_ONCE, n)`.
        skip: tokens before the first of these chunks.
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
    of_inputs, sum_B = tl.zeros((L, L), ACC), tl.zeros((L, BN), ACC)
    for k in range(AT_ONCE):
        h = part * AT_ONCE + k
        row = (b * time + start) * H + h
        taus = tl.load(tau + row + j * H, mask=j < left, other=0.0)
        if tl.sum((taus != 0.0).to(tl.int32), 0) > 0:
            log_decays = tl.load(log_decay + row + j * H, mask=j < left, other=0.0)
            gains = tl.load(gain + row + j * H, mask=j < left, other=0.0).to(ACC)
            high, low, _ = running_sums(log_decays, ACC)
            joint, with_start = joint_decays(high, low, taus, j, ACC, MODE)
            alike = tl.zeros((L, L), ACC)
            for tile in range(tl.cdiv(P, BP)):
                p = tile * BP + tl.arange(0, BP)
                offsets = (chunk * heads + b * H + h) * (P * N) + (p[:, None] * N + n[None, :])
                exists = (p < P)[:, None] & (n < N)[None, :]
                xs = load_tile(x, b, start, h * P, x_row, x_token, j, p, left, P)
                alike += product(xs, tl.trans(xs), ACC, xs.dtype, MODE)
                S = tl.load(before + offsets, mask=exists, other=0.0).to(ACC)
                sum_B += product(xs, S, ACC, xs.dtype, MODE) * (with_start * gains)[:, None]
            of_inputs += joint * alike * gains[:, None] * gains[None, :]
    Bs = load_tile(B, b, start, part * AT_ONCE // R * N, B_row, B_token, j, n, left, N)
    sum_B += product(of_inputs, Bs, ACC, Bs.dtype, MODE)
    at = (b * time + start) * (PARTS * N) + part * N + (j[:, None] * (PARTS * N) + n[None, :])
    inside = (j < left)[:, None] & (n < N)[None, :]
    tl.store(dB + at, tl.load(dB + at, mask=inside, other=0.0) - sum_B, mask=inside)
