"""What cells of the gated delta rule share: see `gated_deltanet` and `kda`."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.cells.edit import Steps
from longrnn.cells.scanning import (
    ScanningCell,
    check_sizes,
    conv_state_like,
    divided,
    step_bias,
)
from longrnn.ops.conv import CONV
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.delta import DELTA
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.norm import rms_norm
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import ScanInputs

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
    conv1d: nn.Conv1d
    norm: nn.Module

    def set_sizes(
        self,
        *,
        n_heads: int | None,
        n_key_heads: int | None,
        key_dim: int,
        value_dim: int,
        d_conv: int,
        norm_eps: float,
    ) -> None:
        """Sets and checks options of the constructor."""
        if n_heads is None:
            n_heads = divided(2 * self.d_model, "2 · d_model =", value_dim=max(1, value_dim))
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

    def convolved(
        self, mixed: Tensor, gate: Tensor, state: ConvState, rows: Rows | None
    ) -> tuple[Tensor, DeltaRest]:
        """v `(b, t, h, p)` and the rest, from the projections of q, k and v, `(b, t, c)`."""
        # Wide from here on: the norms of q and k magnify what is rounded before them.
        mixed, weight = mixed.to(state.ssm.dtype), own_weight(self.conv1d)[:, 0]
        mixed, conv = CONV(self.backend, mixed, weight, None, state.conv, rows)
        if rows is not None:
            mixed = rows.without_padding(mixed)
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

    @abstractmethod
    def activation(self, gate: Tensor) -> Tensor:
        """What the normed output is multiplied by."""

    def state_like(self) -> ConvState:
        conv = (self.d_conv - 1, self.in_sizes[0])
        ssm = (self.n_heads, self.value_dim, self.key_dim)
        return conv_state_like(conv, ssm, self.conv1d.weight.dtype)


def _unit_vectors(vectors: Tensor) -> Tensor:
    return vectors * (vectors.square().sum(-1, keepdim=True) + EPS).rsqrt()
