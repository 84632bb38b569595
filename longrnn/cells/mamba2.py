"""Mamba-2: a scalar-decay state-space cell with a short convolution and a gated output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

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
    step_bias,
)
from longrnn.errors import UserError
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.mamba2_layer import MAMBA2_LAYER, OTHER_GATE
from longrnn.ops.mamba2_layer.definition import Parts, Weights, after, before
from longrnn.ops.operation import Operation
from longrnn.ops.rows import Rows
from longrnn.ops.scan.decays import Decay
from longrnn.ops.scan.definition import ScanInputs

ANY_STEP = (0.0, math.inf)


def check_range(name: str, pair: list[float], *, limit: bool = False) -> None:
    """Refuses what is not a valid range [least, largest].

    Args:
        name: of the option.
        pair: the numbers given.
        limit: whether the range limits dt, so that its ends may be 0 and infinite. Other ranges are
            those of initial values, which must be positive and finite.
    """
    if len(pair) != 2:
        raise UserError(f"{name} is [least, largest], not {pair}: set two numbers in order")
    least, largest = pair
    positive = least >= 0 if limit else least > 0
    if not (positive and least <= largest and (limit or math.isfinite(largest))):
        raise UserError(
            f"{name} is [least, largest] with both {'at least' if limit else 'above'} 0, "
            f"not {pair}: give the smaller number first"
        )


@MIXERS.register("mamba2")
class Mamba2(ScanningCell):
    """The Mamba-2 cell (arXiv 2405.21060) with the weight names of the published models.

    Args:
        d_input: width of x.
        d_model: width of y.
        d_state: n, numbers of state per channel.
        head_dim: p, channels per head, a divisor of expand · d_model.
        expand: the inner width is expand · d_model.
        n_groups: g, a divisor of the number of heads; heads of a group share B and C.
        d_conv: k, width of the convolution.
        dt_min: smallest initial dt; initial dt is log-uniform in [dt_min, dt_max].
        dt_max: largest initial dt.
        dt_limit: [least, largest] dt at run time; null for no limit.
        A_init: [least, largest] initial −A, drawn uniformly.
        norm_eps: added to the mean square in the gated norm.
        bias: whether the two projections have a bias.
        conv_bias: whether the convolution has a bias.
        backend: `auto`, `torch`, `cpu`, `fla` or `mamba_ssm`; see `longrnn.ops.operation`.
        init: see `longrnn.cells.init`: `default` or `long_memory`.
    """

    recurrent_weights = ("in_proj.weight", "A_log", "dt_bias")
    wide_weights = ("A_log", "dt_bias", "D")
    rate_weight, bias_weight = "A_log", "dt_bias"
    projections = ("in_proj", "out_proj")
    shown = ("n_heads", "d_state")
    layer_operation: ClassVar[Operation | None] = MAMBA2_LAYER
    # Of layers of another architecture; see `Weights`.
    norm_groups: int | None = None
    gate: Callable[..., Tensor] | None = None

    def __init__(
        self,
        d_input: int,
        d_model: int,
        *,
        d_state: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        n_groups: int = 1,
        d_conv: int = 4,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_limit: list[float] | None = None,
        A_init: list[float] = [1.0, 16.0],  # noqa: B006 (never changed)
        norm_eps: float = 1e-5,
        bias: bool = False,
        conv_bias: bool = True,
        backend: str = "auto",
        init: str = "default",
    ) -> None:
        super().__init__(d_input, d_model, backend)
        check_sizes(
            norm_eps,
            d_state=d_state,
            head_dim=head_dim,
            expand=expand,
            n_groups=n_groups,
            d_conv=d_conv,
        )
        check_range("A_init", A_init)
        if dt_limit is not None:
            check_range("dt_limit", dt_limit, limit=True)
        check_range("[dt_min, dt_max]", [dt_min, dt_max])
        d_inner = expand * d_model
        self.n_heads = divided(d_inner, "expand · d_model =", head_dim=head_dim)
        divided(self.n_heads, "the number of heads", n_groups=n_groups)
        self.d_inner, self.d_state, self.head_dim = d_inner, d_state, head_dim
        self.n_groups, self.d_conv, self.norm_eps = n_groups, d_conv, norm_eps
        self.dt_limit = ANY_STEP if dt_limit is None else (dt_limit[0], dt_limit[1])

        self.d_xBC = d_inner + 2 * n_groups * d_state
        self.in_proj = Linear(d_input, d_inner + self.d_xBC + self.n_heads, bias=bias)
        self.conv1d = nn.Conv1d(self.d_xBC, self.d_xBC, d_conv, groups=self.d_xBC, bias=conv_bias)
        self.dt_bias = step_bias(self.n_heads, dt_min, dt_max)
        self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(*A_init).log())
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = nn.RMSNorm(d_inner, eps=norm_eps)
        self.out_proj = Linear(d_inner, d_model, bias=bias)
        initialise(self, init)

    def whole_layer(
        self, x: Tensor, state: ConvState, edit: Edit, rows: Rows | None
    ) -> tuple[Tensor, ConvState] | None:
        weights, demands = self.weights(), self.demands(edit, rows)
        if self.gate is not None or self.norm_groups not in (None, self.n_groups):
            demands.add(OTHER_GATE)
        assert self.layer_operation is not None
        implementation = self.layer_operation.choose(
            self.backend, x, weights, state, demands=demands
        )
        if implementation is None:
            return None
        y, state = implementation.run(self.in_proj(x), weights, state)
        return self.out_proj(y), state

    def before(self, x: Tensor, state: ConvState, rows: Rows | None) -> tuple[Steps, Parts]:
        parts = before(self.in_proj(x), self.weights(), state, self.backend, rows)
        return Steps(parts.x, parts.dt, Decay(parts.dt, parts.A)), parts

    def after(self, y: Tensor, rest: Parts, memory: Tensor) -> tuple[Tensor, ConvState]:
        return self.out_proj(after(y, rest, self.backend)), ConvState(rest.conv, memory)

    def weights(self) -> Weights:
        """The parameters between the projections."""
        return Weights(
            own_weight(self.conv1d)[:, 0],
            self.conv1d.bias,
            self.dt_bias,
            self.A_log,
            self.D,
            own_weight(self.norm),
            self.n_groups,
            self.norm_eps,
            self.dt_limit,
            self.norm_groups,
            self.gate,
        )

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        self.A_log.copy_(-(scales * F.softplus(self.dt_bias)).log())  # dt · |A| = 1 / scale
        return True

    def state_like(self) -> ConvState:
        # Shards of a model may be gathered in a narrower dtype, but for those of the convolution.
        dtype = self.conv1d.weight.dtype
        ssm = (self.n_heads, self.head_dim, self.d_state)
        return conv_state_like((self.d_conv - 1, self.d_xBC), ssm, dtype)

    def inputs_like(self) -> ScanInputs:
        like, narrow = super().inputs_like(), self.conv1d.weight.dtype
        return like._replace(x=like.x.to(narrow), B=like.B.to(narrow), C=like.C.to(narrow))
