"""Gated DeltaNet: the delta rule with a decay, short convolutions and a gated output.

For every head, with the memory S `(n, p)` and unit vectors q and k:

    S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   y_t = S_tᵀ q_t / √n
    β = σ(b), or 2 σ(b),   α = exp(−exp(A_log) · softplus(a + dt_bias))

q, k, v, z, b and a are projections of the input; q, k and v pass a short convolution with silu. The
output is W_o (rms_norm(y) · silu(z)), normalised per head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells.base import MIXERS
from longrnn.cells.delta import DeltaCell, DeltaRest
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.init import initialise
from longrnn.cells.weights import Part, rows_from
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.linear import Linear
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import Decay


@MIXERS.register("gated_deltanet")
class GatedDeltaNet(DeltaCell):
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
    projections = ("in_proj", "out_proj")

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
        self.set_sizes(
            n_heads=n_heads,
            n_key_heads=n_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            d_conv=d_conv,
            norm_eps=norm_eps,
        )
        self.largest_beta = 2.0 if negative_eigenvalues else 1.0
        heads, values = self.n_heads, self.n_heads * value_dim
        keys = self.n_key_heads * key_dim
        self.in_sizes = [2 * keys + values, values, heads, heads]  # q k v, z, b, a
        self.in_proj = Linear(d_input, sum(self.in_sizes), bias=False)
        self.add_weights(heads, 0.01)
        initialise(self, init)

    @property
    def step_weights(self) -> dict[str, Part]:
        return {"in_proj.weight": rows_from(-2 * self.n_heads)}

    def before(
        self, x: Tensor, state: ConvState, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, DeltaRest]:
        dtype = state.ssm.dtype
        mixed, z, b, a = self.in_proj(x).split(self.in_sizes, dim=-1)
        v, rest = self.convolved(mixed, z, state, rows)
        beta = b.to(dtype).sigmoid() * self.largest_beta
        step = F.softplus(a.to(dtype) + edit.biased(self.dt_bias).to(dtype))
        return Steps(v, beta, Decay(step, -self.A_log.to(dtype).exp())), rest

    def activation(self, gate: Tensor) -> Tensor:
        return F.silu(gate)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        self.A_log.copy_(-(scales * F.softplus(self.dt_bias)).log())
        return True
