"""Mamba-2: a scalar-decay state-space cell with a short convolution and a gated output.

Every head has the state h `(p, n)`, and for its input x_t:

    h_t = exp(dt_t A) h_{t−1} + dt_t x_t B_tᵀ,   y_t = h_t C_t
    dt = softplus(· + dt_bias),   A = −exp(A_log)

z, x, B, C and dt are projections of the input; x, B and C pass a short convolution with silu. The
output is W_o rms_norm((y + D x) · silu(z)), normalised per group.
"""

import math
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
    step_bias,
)
from longrnn.cells.weights import Part, rows_from
from longrnn.errors import UserError
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.gated_norm import GATED_NORM
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import Decay, ScanInputs

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


class Mamba2Rest(NamedTuple):
    """`z`: `(b, t, h p)`, the gate; `x`: `(b, t, h, p)`; `B` and `C`: `(b, t, g, n)`; `conv`: the
    last inputs of the convolution."""

    z: Tensor
    x: Tensor
    B: Tensor
    C: Tensor
    conv: Tensor


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
    rate_weight, bias_weight, dt_weight = "A_log", "dt_bias", "in_proj.weight"
    projections = ("in_proj", "out_proj")
    shown = ("n_heads", "d_state")
    unsuited_backends = frozenset()

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

    @property
    def step_weights(self) -> dict[str, Part]:
        return {"in_proj.weight": rows_from(-self.n_heads)}

    def before(
        self, x: Tensor, state: ConvState, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, Mamba2Rest]:
        dtype, sizes = state.ssm.dtype, [self.d_inner, self.d_xBC, self.n_heads]
        z, xBC, dt = self.in_proj(x).split(sizes, dim=-1)
        xBC, conv = self.convolved(xBC, state, rows)
        keys = self.n_groups * self.d_state
        x, B, C = xBC.split([self.d_inner, keys, keys], dim=-1)
        x = x.unflatten(-1, (self.n_heads, -1))
        B, C = (shared.unflatten(-1, (self.n_groups, -1)) for shared in (B, C))
        dt = F.softplus(dt.to(dtype) + edit.biased(self.dt_bias).to(dtype)).clamp(*self.dt_limit)
        A = -self.A_log.to(dtype).exp()
        return Steps(x, dt, Decay(dt, A)), Mamba2Rest(z, x, B, C, conv)

    def after(self, y: Tensor, rest: Mamba2Rest, memory: Tensor) -> tuple[Tensor, ConvState]:
        return self.out_proj(self.gate(y, rest.z, rest.x)), ConvState(rest.conv, memory)

    def gate(self, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
        """The input of the output projection, `(b, t, h p)`; see `longrnn.ops.gated_norm`."""
        weight, groups = own_weight(self.norm), self.n_groups
        return GATED_NORM(self.backend, y, z, x, self.D, weight, self.norm_eps, groups)

    def state_like(self) -> ConvState:
        # Shards of a model may be gathered in a narrower dtype, but for those of the convolution.
        dtype = self.conv1d.weight.dtype
        ssm = (self.n_heads, self.head_dim, self.d_state)
        return conv_state_like((self.d_conv - 1, self.d_xBC), ssm, dtype)

    def inputs_like(self) -> ScanInputs:
        like, narrow = super().inputs_like(), self.conv1d.weight.dtype
        return like._replace(x=like.x.to(narrow), B=like.B.to(narrow), C=like.C.to(narrow))
