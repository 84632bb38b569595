"""Kimi Delta Attention: the delta rule with one decay per key, and gates of low rank.

For every head, with the memory S `(n, p)` and unit vectors q and k:

    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   y_t = S_tᵀ q_t / √n
    β = σ(b),   α = exp(−exp(A_log) · softplus(W_α a + dt_bias)), one number per key

q, k, v, b, a and g are projections of the input; q, k and v pass a short convolution with silu, and
a and g have `rank` entries for all heads. The output is W_o (rms_norm(y) · σ(W_z g)), normalised
per head. As in `longrnn.cells.gated_deltanet`, dt is β, and the decay has a step of its own.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells.base import MIXERS
from longrnn.cells.delta import DeltaCell, DeltaRest
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.init import initialise
from longrnn.cells.scanning import check_sizes, inverse_softplus
from longrnn.cells.weights import WHOLE, Part
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.linear import Linear
from longrnn.ops.precision import without_autocast
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import Decay


@MIXERS.register("kda")
class KDA(DeltaCell):
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
    projections = ("in_proj", "decay_proj", "gate_proj", "out_proj")
    has_key_decays = True

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
        self.set_sizes(
            n_heads=n_heads,
            n_key_heads=n_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            d_conv=d_conv,
            norm_eps=norm_eps,
        )
        rank = value_dim if rank is None else rank
        check_sizes(norm_eps, rank=rank)
        heads, values = self.n_heads, self.n_heads * value_dim
        keys = self.n_key_heads * key_dim
        self.in_sizes = [2 * keys + values, rank, rank, heads]  # q k v, a, g, b
        self.in_proj = Linear(d_input, sum(self.in_sizes), bias=False)
        self.decay_proj = Linear(rank, heads * key_dim, bias=False)
        self.gate_proj = Linear(rank, values, bias=False)
        self.add_weights(heads * key_dim, 1)
        initialise(self, init)

    @property
    def step_weights(self) -> dict[str, Part]:
        mixed, rank, _, heads = self.in_sizes  # q k v, a, g, b
        total = sum(self.in_sizes)
        steps = [*range(mixed, mixed + rank), *range(total - heads, total)]
        return {"in_proj.weight": (steps,), "decay_proj.weight": WHOLE}

    def before(
        self, x: Tensor, state: ConvState, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, DeltaRest]:
        dtype = state.ssm.dtype
        mixed, a, g, b = self.in_proj(x).split(self.in_sizes, dim=-1)
        v, rest = self.convolved(mixed, self.gate_proj(g), state, rows)
        with without_autocast(a):  # which would round the decays
            inputs = self.decay_proj(a.to(self.decay_proj.weight.dtype)).to(dtype)
        inputs = (inputs + edit.biased(self.dt_bias).to(dtype)).unflatten(-1, (self.n_heads, -1))
        # Flat, because a Hugging Face layer has further axes of length 1.
        decay = self.decay(inputs, self.A_log.to(dtype).exp().flatten())
        return Steps(v, b.to(dtype).sigmoid(), decay), rest

    def decay(self, inputs: Tensor, rate: Tensor) -> Decay:
        """The decays of W_α a + dt_bias, `(b, t, h, n)`, and of exp(A_log), `(h,)`."""
        return Decay(F.softplus(inputs), -rate)

    def activation(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        dt = (1 / (scales * self.A_log.exp())).repeat_interleave(self.key_dim)
        self.dt_bias.copy_(inverse_softplus(dt))
        return True
