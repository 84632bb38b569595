"""Gated DeltaNet: the delta rule with a decay, short convolutions and a gated output.

For every head, with the memory S `(n, p)` and unit vectors q and k:

    S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   y_t = S_tᵀ q_t / √n
    β = σ(b), or 2 σ(b),   α = exp(−exp(A_log) · softplus(a + dt_bias))

q, k, v, z, b and a are projections of the input; q, k and v pass a short convolution with silu. The
output is W_o (rms_norm(y) · silu(z)), normalised per head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import MIXERS
from longrnn.cells.edit import Steps
from longrnn.cells.init import initialise
from longrnn.cells.scanning import ScanningCell, check_sizes, divided
from longrnn.ops.conv import CONV
from longrnn.ops.delta import DELTA
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.norm import rms_norm
from longrnn.ops.rows import Rows
from longrnn.ops.scan.definition import ScanInputs

# Added to the square of the length of q and k.
EPS = 1e-6
# A larger β would let the memory grow.
MAX_BETA = 2.0


class GatedDeltaNetState(NamedTuple):
    """`conv`: `(b, d_conv − 1, c)`, the last inputs of the convolution;
    `ssm`: `(b, h, p, n)`, Sᵀ of every head, float32 or wider."""

    conv: Tensor
    ssm: Tensor


class GatedDeltaNetRest(NamedTuple):
    """`z`: `(b, t, h p)`, the gate; `q` and `k`: `(b, t, g, n)`, of length 1 / √n and 1; `conv`:
    the last inputs of the convolution."""

    z: Tensor
    q: Tensor
    k: Tensor
    conv: Tensor


@MIXERS.register("gated_deltanet")
class GatedDeltaNet(ScanningCell):
    """The Gated DeltaNet cell (arXiv 2412.06464).

    Args:
        d_input: width of x.
        d_model: width of y.
        n_heads: number of heads, each with values and a state of its own; null for
            2 · d_model / value_dim.
        n_key_heads: number of q and k, a divisor of n_heads; null for n_heads.
        key_dim: n, length of q and k.
        value_dim: p, length of v.
        d_conv: width of the convolution.
        negative_eigenvalues: whether β is up to 2 and not 1, so that a token can negate what the
            memory holds for its key (arXiv 2411.12537).
        norm_eps: added to the mean square in the norm of the output.
        backend: `auto`, `torch`, `cpu` or `fla`; see `longrnn.ops.operation`.
        init: see `longrnn.cells.init`: `default` or `long_memory`.
    """

    recurrent_weights = ("in_proj.weight", "A_log", "dt_bias")
    wide_weights = ("A_log", "dt_bias")
    projections = ("in_proj", "out_proj")
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
        d_conv: int = 4,
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        init: str = "default",
    ) -> None:
        super().__init__(d_input, d_model, backend)
        if n_heads is None:
            n_heads = divided(2 * d_model, "2 · d_model =", value_dim=max(1, value_dim))
        n_key_heads = n_heads if n_key_heads is None else n_key_heads
        check_sizes(
            norm_eps,
            n_heads=n_heads,
            n_key_heads=n_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            d_conv=d_conv,
        )
        divided(n_heads, "n_heads =", n_key_heads=n_key_heads)
        self.n_heads, self.n_key_heads = n_heads, n_key_heads
        self.key_dim, self.value_dim, self.d_conv = key_dim, value_dim, d_conv
        self.largest_beta = 2.0 if negative_eigenvalues else 1.0
        self.norm_eps = norm_eps

        keys, values = n_key_heads * key_dim, n_heads * value_dim
        self.in_sizes = [2 * keys + values, values, n_heads, n_heads]  # q k v, z, b, a
        self.in_proj = Linear(d_input, sum(self.in_sizes), bias=False)
        channels = self.in_sizes[0]
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=False)
        # Published: initial steps of the decay log-uniform in [0.001, 0.1], rates up to 16.
        dt = torch.empty(n_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(torch.empty(n_heads).uniform_(0.01, 16).log())
        self.norm = nn.RMSNorm(value_dim, eps=norm_eps)
        self.out_proj = Linear(values, d_model, bias=False)
        initialise(self, init)

    def before(
        self, x: Tensor, state: GatedDeltaNetState, rows: Rows | None
    ) -> tuple[Steps, GatedDeltaNetRest]:
        projected, dtype, groups = self.in_proj(x), state.ssm.dtype, self.n_key_heads
        mixed, z, b, a = projected.split(self.in_sizes, dim=-1)
        # Wide from here on: the norms of q and k magnify what is rounded before them.
        weight = own_weight(self.conv1d)[:, 0]
        mixed, conv = CONV(self.backend, mixed.to(dtype), weight, None, state.conv, rows)
        if rows is not None:
            mixed = rows.without_padding(mixed)
        keys = groups * self.key_dim
        q, k, v = mixed.split([keys, keys, self.n_heads * self.value_dim], dim=-1)
        q = unit_vectors(q.unflatten(-1, (groups, -1))) * self.key_dim**-0.5
        k = unit_vectors(k.unflatten(-1, (groups, -1)))
        beta = b.to(dtype).sigmoid() * self.largest_beta
        decay_dt = F.softplus(a.to(dtype) + self.dt_bias.to(dtype))
        v, A = v.unflatten(-1, (self.n_heads, -1)), -self.A_log.to(dtype).exp()
        return Steps(v, beta, A, decay_dt), GatedDeltaNetRest(z, q, k, conv)

    def inputs(self, steps: Steps, rest: GatedDeltaNetRest) -> tuple[ScanInputs, GatedDeltaNetRest]:
        v = steps.x if steps.add is None else steps.x * steps.add[:, None]
        beta = steps.dt.clamp(max=MAX_BETA)
        return ScanInputs(v, beta, steps.log_decay, rest.k, rest.q), rest

    def after(
        self, y: Tensor, rest: GatedDeltaNetRest, memory: Tensor
    ) -> tuple[Tensor, GatedDeltaNetState]:
        y = rms_norm(y, own_weight(self.norm), self.norm_eps).flatten(2)
        y = (y * F.silu(rest.z.to(y.dtype))).to(rest.z.dtype)
        return self.out_proj(y), GatedDeltaNetState(rest.conv, memory)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        self.A_log.copy_(-(scales * F.softplus(self.dt_bias)).log())
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


def unit_vectors(vectors: Tensor) -> Tensor:
    return vectors * (vectors.square().sum(-1, keepdim=True) + EPS).rsqrt()
