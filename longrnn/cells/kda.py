"""Kimi Delta Attention: the delta rule with one decay per key, and gates of low rank.

For every head, with the memory S `(n, p)` and unit vectors q and k:

    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   y_t = S_tᵀ q_t / √n
    β = σ(b),   α = exp(−exp(A_log) · softplus(W_α a + dt_bias)), one number per key

q, k, v, b, a and g are projections of the input; q, k and v pass a short convolution with silu, and
a and g have `rank` entries for all heads. The output is W_o (rms_norm(y) · σ(W_z g)), normalised
per head. As in `longrnn.cells.gated_deltanet`, dt is β, and the decay has a step of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import MIXERS
from longrnn.cells.edit import Steps
from longrnn.cells.gated_deltanet import MAX_BETA, GatedDeltaNetState, unit_vectors
from longrnn.cells.init import initialise
from longrnn.cells.scanning import ScanningCell, check_sizes, divided
from longrnn.ops.conv import CONV
from longrnn.ops.delta import DELTA
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.norm import rms_norm
from longrnn.ops.precision import without_autocast
from longrnn.ops.rows import Rows
from longrnn.ops.scan.definition import ScanInputs


class KDARest(NamedTuple):
    """`gate`: `(b, t, h p)`, before its sigmoid; `q` and `k`: `(b, t, g, n)`; `conv`: of the next
    state."""

    gate: Tensor
    q: Tensor
    k: Tensor
    conv: Tensor


@MIXERS.register("kda")
class KDA(ScanningCell):
    """The Kimi Delta Attention cell (arXiv 2510.26692, section 4).

    Args:
        d_input: width of x.
        d_model: width of y.
        n_heads: number of heads, each with values, decays and a state of its own; null for
            2 · d_model / value_dim.
        n_key_heads: g, number of q and k, a divisor of n_heads; null for n_heads.
        key_dim: n, length of q and k.
        value_dim: p, length of v.
        rank: of the projections of the decays and of the gate; null for value_dim.
        d_conv: width of the convolution.
        norm_eps: added to the mean square in the norm of the output.
        backend: `auto`, `torch`, `cpu` or `fla`; see `longrnn.ops.operation`.
        init: see `longrnn.cells.init`: `default` or `long_memory`.
    """

    recurrent_weights = ("in_proj.weight", "decay_proj.weight", "A_log", "dt_bias")
    wide_weights = ("A_log", "dt_bias")
    projections = ("in_proj", "decay_proj", "gate_proj", "out_proj")
    operation = DELTA
    diagonal = False
    repeats = False

    def __init__(
        self,
        d_input: int,
        d_model: int,
        *,
        n_heads: int | None = None,
        n_key_heads: int | None = None,
        key_dim: int = 64,
        value_dim: int = 64,
        rank: int | None = None,
        d_conv: int = 4,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        init: str = "default",
    ) -> None:
        super().__init__(d_input, d_model, backend)
        if n_heads is None:
            n_heads = divided(2 * d_model, "2 · d_model =", value_dim=max(1, value_dim))
        n_key_heads = n_heads if n_key_heads is None else n_key_heads
        rank = value_dim if rank is None else rank
        check_sizes(
            norm_eps,
            n_heads=n_heads,
            n_key_heads=n_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            rank=rank,
            d_conv=d_conv,
        )
        divided(n_heads, "n_heads =", n_key_heads=n_key_heads)
        self.n_heads, self.n_key_heads = n_heads, n_key_heads
        self.key_dim, self.value_dim, self.d_conv = key_dim, value_dim, d_conv
        self.norm_eps = norm_eps

        keys, values, decays = n_key_heads * key_dim, n_heads * value_dim, n_heads * key_dim
        self.in_sizes = [2 * keys + values, rank, rank, n_heads]  # q k v, a, g, b
        self.in_proj = Linear(d_input, sum(self.in_sizes), bias=False)
        self.decay_proj = Linear(rank, decays, bias=False)
        self.gate_proj = Linear(rank, values, bias=False)
        channels = self.in_sizes[0]
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=False)
        # Published: initial steps of the decays log-uniform in [0.001, 0.1], rates from 1 to 16.
        dt = torch.empty(decays).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(torch.empty(n_heads).uniform_(1, 16).log())
        self.norm = nn.RMSNorm(value_dim, eps=norm_eps)
        self.out_proj = Linear(values, d_model, bias=False)
        initialise(self, init)

    def before(
        self, x: Tensor, state: GatedDeltaNetState, rows: Rows | None
    ) -> tuple[Steps, KDARest]:
        dtype, keys = state.ssm.dtype, self.n_key_heads * self.key_dim
        mixed, a, g, b = self.in_proj(x).split(self.in_sizes, dim=-1)
        # Wide from here on: the norms of q and k magnify what is rounded before them.
        weight = own_weight(self.conv1d)[:, 0]
        mixed, conv = CONV(self.backend, mixed.to(dtype), weight, None, state.conv, rows)
        if rows is not None:
            mixed = rows.without_padding(mixed)
        q, k, v = mixed.split([keys, keys, self.n_heads * self.value_dim], dim=-1)
        q = unit_vectors(q.unflatten(-1, (self.n_key_heads, -1))) * self.key_dim**-0.5
        k = unit_vectors(k.unflatten(-1, (self.n_key_heads, -1)))
        v = v.unflatten(-1, (self.n_heads, -1))
        with without_autocast(a):  # which would round the decays
            decay_dt = self.decay_proj(a.to(self.decay_proj.weight.dtype)).to(dtype)
        decay_dt = F.softplus(decay_dt + self.dt_bias.to(dtype))
        # Flat, because a Hugging Face layer has further axes of length 1.
        A = -self.A_log.to(dtype).exp().flatten()
        steps = Steps(v, b.to(dtype).sigmoid(), A, decay_dt.unflatten(-1, (self.n_heads, -1)))
        return steps, KDARest(self.gate_proj(g), q, k, conv)

    def inputs(self, steps: Steps, rest: KDARest) -> tuple[ScanInputs, KDARest]:
        v = steps.x if steps.add is None else steps.x * steps.add[:, None]
        beta = steps.dt.clamp(max=MAX_BETA)
        return ScanInputs(v, beta, steps.log_decay, rest.k, rest.q), rest

    def after(self, y: Tensor, rest: KDARest, memory: Tensor) -> tuple[Tensor, GatedDeltaNetState]:
        y = rms_norm(y, own_weight(self.norm), self.norm_eps).flatten(2)
        y = (y * rest.gate.to(y.dtype).sigmoid()).to(rest.gate.dtype)
        return self.out_proj(y), GatedDeltaNetState(rest.conv, memory)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        dt = (1 / (scales * self.A_log.exp())).repeat_interleave(self.key_dim)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        return True

    def state_like(self) -> GatedDeltaNetState:
        dtype = self.conv1d.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        sizes = self.n_heads, self.value_dim, self.key_dim
        return GatedDeltaNetState(
            torch.empty(self.d_conv - 1, self.in_sizes[0], dtype=dtype, device="meta"),
            torch.empty(sizes, dtype=wide, device="meta"),
        )

    def extra_repr(self) -> str:
        sizes = f"key_dim={self.key_dim}, value_dim={self.value_dim}"
        return f"n_heads={self.n_heads}, {sizes}, backend={self.backend}"
