"""Mamba (arXiv 2312.00752): a selective state-space cell whose heads are single channels.

Every channel of the inner width has the state h `(n,)`, and for its input x_t:

    h_t = exp(dt_t A) h_{t−1} + dt_t x_t B_t,   y_t = h_t · C_t
    dt = softplus(W_dt δ + b),   A = −exp(A_log)

δ, B and C are projections of all channels; dt is `(d,)` and A `(d, n)`: every key of a head decays
at its own rate. x and z are projections of the input; x passes a short convolution with silu. The
output is W_o ((y + D x) · silu(z)). FalconMamba (arXiv 2410.05355) normalises δ, B and C.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import MIXERS
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.init import initialise
from longrnn.cells.mamba2 import check_range
from longrnn.cells.scanning import ScanningCell, check_sizes, conv_state_like, step_bias
from longrnn.cells.weights import WHOLE, Part, rows_from
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.linear import Linear, linear
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import Decay, ScanInputs


class MambaRest(NamedTuple):
    """x and z `(b, t, d)`, B and C `(b, t, g, n)`, and `conv` of the next state."""

    x: Tensor
    z: Tensor
    B: Tensor
    C: Tensor
    conv: Tensor


class StepProjection(nn.Module):
    """The weights of dt = softplus(W δ + b)."""

    def __init__(self, rank: int, channels: int, dt_min: float, dt_max: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, rank).uniform_(-1, 1) * rank**-0.5)
        self.bias = step_bias(channels, dt_min, dt_max)


@MIXERS.register("mamba")
class Mamba(ScanningCell):
    """The Mamba cell with the weight names of the published models.

    Args:
        d_input: width of x.
        d_model: width of y.
        d_state: n, numbers of state per channel.
        expand: the inner width d is expand · d_model; every channel of it is a head.
        dt_rank: length of δ; null for d_model / 16, rounded up.
        d_conv: width of the convolution.
        dt_min: smallest initial dt; initial dt is log-uniform in [dt_min, dt_max].
        dt_max: largest initial dt.
        select_norm_eps: added to the mean square in norms without weights of δ, B and C, as in
            FalconMamba; null for no norms.
        bias: whether the projections of input and output have a bias.
        conv_bias: whether the convolution has a bias.
        backend: `auto`, `torch` or `cpu`.
        init: see `longrnn.cells.init`: `default` or `long_memory`.
    """

    recurrent_weights = ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "A_log")
    wide_weights = ("A_log", "D", "dt_proj.bias")
    rate_weight, bias_weight, dt_weight = "A_log", "dt_proj.bias", "dt_proj.weight"
    projections = ("in_proj", "x_proj", "out_proj")
    has_key_decays = True

    def __init__(
        self,
        d_input: int,
        d_model: int,
        *,
        d_state: int = 16,
        expand: int = 2,
        dt_rank: int | None = None,
        d_conv: int = 4,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        select_norm_eps: float | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        backend: str = "auto",
        init: str = "default",
    ) -> None:
        super().__init__(d_input, d_model, backend)
        dt_rank = -(-d_model // 16) if dt_rank is None else dt_rank
        sizes = {"d_state": d_state, "expand": expand, "dt_rank": dt_rank, "d_conv": d_conv}
        check_sizes(select_norm_eps or 0.0, eps_name="select_norm_eps", **sizes)
        check_range("[dt_min, dt_max]", [dt_min, dt_max])
        self.n_heads, self.d_state, self.d_conv = expand * d_model, d_state, d_conv
        self.n_groups, self.dt_rank, self.select_norm_eps = 1, dt_rank, select_norm_eps

        inner = self.n_heads
        self.in_proj = Linear(d_input, 2 * inner, bias=bias)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, bias=conv_bias)
        self.x_proj = Linear(inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = StepProjection(dt_rank, inner, dt_min, dt_max)
        self.A_log = nn.Parameter(torch.arange(1, d_state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = Linear(inner, d_model, bias=bias)
        initialise(self, init)

    @property
    def step_weights(self) -> dict[str, Part]:
        return {"x_proj.weight": rows_from(0, self.dt_rank), "dt_proj.weight": WHOLE}

    def before(
        self, x: Tensor, state: ConvState, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, MambaRest]:
        dtype = state.ssm.dtype
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x, conv = self.convolved(x, state, rows)
        dt, B, C = self.select(x, dtype)
        dt = F.softplus(edit.biased(dt))
        steps = Steps(x.to(dtype)[..., None], dt, Decay(dt, self.rate(dtype)))
        return steps, MambaRest(x, z, B, C, conv)

    def rate(self, dtype: torch.dtype) -> Tensor:
        """A, `(d, n)`."""
        return -self.A_log.to(dtype).exp()

    def select(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """dt before the softplus, `(b, t, d)`, and B and C, `(b, t, g, n)`, in a dtype."""
        parts = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta, B, C = self.normed(*parts)
        if "base_layer" in self.dt_proj._modules:  # only a call computes an adapter
            dt = self.dt_proj(delta).to(dtype)
        else:
            dt = linear(delta, self.dt_proj.weight.to(delta.dtype)).to(dtype)
            dt = dt + self.dt_proj.bias.to(dtype)
        return dt, B[:, :, None].to(dtype), C[:, :, None].to(dtype)

    def normed(self, delta: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """δ, B and C, `(b, t, …)`, after their norms, if there are any."""
        if (eps := self.select_norm_eps) is None:
            return delta, B, C
        return _unit(delta, eps), _unit(B, eps), _unit(C, eps)

    def after(self, y: Tensor, rest: MambaRest, memory: Tensor) -> tuple[Tensor, ConvState]:
        y = torch.addcmul(y[..., 0], rest.x.to(y), self.D.to(y))
        y = (y * F.silu(rest.z.to(y.dtype))).to(rest.z.dtype)
        return self.out_proj(y), ConvState(rest.conv, memory)

    def state_like(self) -> ConvState:
        conv, ssm = (self.d_conv - 1, self.n_heads), (self.n_heads, 1, self.d_state)
        return conv_state_like(conv, ssm, self.conv1d.weight.dtype)

    def inputs_like(self) -> ScanInputs:
        like = super().inputs_like()
        return like._replace(decay=Decay(like.gain, self.rate(like.gain.dtype)))


def _unit(vectors: Tensor, eps: float) -> Tensor:
    """Vectors divided by their root mean square, which is computed in float32 or wider."""
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    return F.rms_norm(wide, wide.shape[-1:], eps=eps).to(vectors.dtype)
