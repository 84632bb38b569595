"""Gated DeltaNet and Kimi Delta Attention: the delta rule with a decay per head, or per key.

For every head, with the memory S `(n, p)` and unit vectors q and k:

    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   y_t = S_tᵀ q_t / √n

q, k and v are projections of the input that pass a short convolution with silu. In both cells the
step dt is β, and the decay α has a step of its own.

| | Gated DeltaNet | Kimi Delta Attention |
| --- | --- | --- |
| α = exp(−exp(A_log) · softplus(a + dt_bias)) | one a per head | one a per key: W_α a' |
| β | σ(b), or 2 σ(b) | σ(b) |
| output | W_o (rms_norm(y) · silu(z)) | W_o (rms_norm(y) · σ(W_z g)) |

b, a and z, or b, a' and g, are projections of the input; a' and g have `rank` entries for all
heads. The output is normalised per head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import MIXERS
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.init import initialise
from longrnn.cells.scanning import (
    ScanningCell,
    check_sizes,
    conv_state_like,
    divided,
    inverse_softplus,
    step_bias,
)
from longrnn.cells.weights import WHOLE, Part, rows_from
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.norm import rms_norm
from longrnn.ops.precision import without_autocast
from longrnn.ops.rows import Rows
from longrnn.ops.scan import DELTA
from longrnn.ops.scan.inputs import Decay, ScanInputs

# Added to the square of the length of q and k.
EPS = 1e-6
# A larger β would let the memory grow.
MAX_BETA = 2.0


class DeltaRest(NamedTuple):
    """`gate`: `(b, t, h p)`, before its activation; `q` and `k`: `(b, t, g, n)`, of length 1 / √n
    and 1; `conv`: the last inputs of the convolution."""

    gate: Tensor
    q: Tensor
    k: Tensor
    conv: Tensor


class DeltaCell(ScanningCell):
    """A cell of the gated delta rule, whose q, k and v pass a short convolution with silu.

    The step dt is β, and the decay has a step of its own. Its `rest` is a `DeltaRest`.
    """

    wide_weights = ("A_log", "dt_bias")
    rate_weight, bias_weight = "A_log", "dt_bias"
    operation = DELTA
    diagonal = False
    repeats = False
    shown = ("n_heads", "key_dim", "value_dim")
    in_sizes: list[int]
    norm: nn.Module
    activation: Callable[[Tensor], Tensor]  # of the gate of the output

    def __init__(
        self,
        d_input: int,
        d_model: int,
        *,
        n_heads: int | None,
        n_key_heads: int | None,
        key_dim: int,
        value_dim: int,
        d_conv: int,
        norm_eps: float,
        backend: str,
    ) -> None:
        super().__init__(d_input, d_model, backend)
        check_sizes(norm_eps, key_dim=key_dim, value_dim=value_dim, d_conv=d_conv)
        if n_heads is None:
            n_heads = divided(2 * d_model, "2 · d_model =", value_dim=value_dim)
        n_key_heads = n_heads if n_key_heads is None else n_key_heads
        check_sizes(norm_eps, n_heads=n_heads, n_key_heads=n_key_heads)
        divided(n_heads, "n_heads =", n_key_heads=n_key_heads)
        self.n_heads, self.n_key_heads = n_heads, n_key_heads
        self.key_dim, self.value_dim, self.d_conv = key_dim, value_dim, d_conv
        self.norm_eps = norm_eps

    def add_weights(self, decays: int, least_rate: float) -> None:
        """Adds the modules that all these cells have, with the published initial values.

        Args:
            decays: how many decays a token has.
            least_rate: the rates are from this number to 16, their steps from 0.001 to 0.1.
        """
        channels = self.in_sizes[0]
        self.conv1d = nn.Conv1d(channels, channels, self.d_conv, groups=channels, bias=False)
        self.dt_bias = step_bias(decays)
        self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(least_rate, 16).log())
        self.norm = nn.RMSNorm(self.value_dim, eps=self.norm_eps)
        self.out_proj = Linear(self.n_heads * self.value_dim, self.d_model, bias=False)

    def vectors(
        self, mixed: Tensor, gate: Tensor, state: ConvState, rows: Rows | None
    ) -> tuple[Tensor, DeltaRest]:
        """v `(b, t, h, p)` and the rest, from the projections of q, k and v, `(b, t, c)`."""
        # Wide from here on: the norms of q and k magnify what is rounded before them.
        mixed, conv = self.convolved(mixed.to(state.ssm.dtype), state, rows)
        keys = self.n_key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.n_heads * self.value_dim], dim=-1)
        q = _unit_vectors(q.unflatten(-1, (self.n_key_heads, -1))) * self.key_dim**-0.5
        k = _unit_vectors(k.unflatten(-1, (self.n_key_heads, -1)))
        return v.unflatten(-1, (self.n_heads, -1)), DeltaRest(gate, q, k, conv)

    def inputs(self, steps: Steps, rest: DeltaRest) -> tuple[ScanInputs, DeltaRest]:
        v = steps.x if steps.add is None else steps.x * steps.add[:, None]
        beta = steps.dt.clamp(max=MAX_BETA)
        return ScanInputs(v, beta, steps.decay, rest.k, rest.q), rest

    def after(self, y: Tensor, rest: DeltaRest, memory: Tensor) -> tuple[Tensor, ConvState]:
        y = rms_norm(y, own_weight(self.norm), self.norm_eps).flatten(2)
        y = (y * self.activation(rest.gate.to(y.dtype))).to(rest.gate.dtype)
        return self.out_proj(y), ConvState(rest.conv, memory)

    def state_like(self) -> ConvState:
        conv = (self.d_conv - 1, self.in_sizes[0])
        ssm = (self.n_heads, self.value_dim, self.key_dim)
        return conv_state_like(conv, ssm, self.conv1d.weight.dtype)


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
    activation = staticmethod(F.silu)

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
        super().__init__(
            d_input,
            d_model,
            n_heads=n_heads,
            n_key_heads=n_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            d_conv=d_conv,
            norm_eps=norm_eps,
            backend=backend,
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
        v, rest = self.vectors(mixed, z, state, rows)
        beta = b.to(dtype).sigmoid() * self.largest_beta
        step = F.softplus(a.to(dtype) + edit.biased(self.dt_bias).to(dtype))
        return Steps(v, beta, Decay(step, -self.A_log.to(dtype).exp())), rest


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
    activation = staticmethod(torch.sigmoid)
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
        super().__init__(
            d_input,
            d_model,
            n_heads=n_heads,
            n_key_heads=n_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            d_conv=d_conv,
            norm_eps=norm_eps,
            backend=backend,
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
        v, rest = self.vectors(mixed, self.gate_proj(g), state, rows)
        with without_autocast(a):  # which would round the decays
            inputs = self.decay_proj(a.to(self.decay_proj.weight.dtype)).to(dtype)
        inputs = (inputs + edit.biased(self.dt_bias).to(dtype)).unflatten(-1, (self.n_heads, -1))
        # Flat, because a Hugging Face layer has further axes of length 1.
        decay = self.decay(inputs, self.A_log.to(dtype).exp().flatten())
        return Steps(v, b.to(dtype).sigmoid(), decay), rest

    def decay(self, inputs: Tensor, rate: Tensor) -> Decay:
        """The decays of W_α a + dt_bias, `(b, t, h, n)`, and of exp(A_log), `(h,)`."""
        return Decay(F.softplus(inputs), -rate)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        dt = (1 / (scales * self.A_log.exp())).repeat_interleave(self.key_dim)
        self.dt_bias.copy_(inverse_softplus(dt))
        return True


def _unit_vectors(vectors: Tensor) -> Tensor:
    return vectors * (vectors.square().sum(-1, keepdim=True) + EPS).rsqrt()
