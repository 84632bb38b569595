"""Mamba-2: a scalar-decay state-space cell with a short convolution and a gated output."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from longrnn.errors import UserError
from longrnn.mixers.base import MIXERS, ScanningMixer
from longrnn.mixers.edits import Edit, Steps
from longrnn.mixers.init import initialise
from longrnn.ops import triton as gpu_kernels
from longrnn.ops.conv import causal_conv
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import NATIVE, Linear
from longrnn.ops.mamba2 import CellOptions, fused_cell
from longrnn.ops.native import Weights, parts
from longrnn.ops.native.gradients import CellInputs
from longrnn.ops.native.layer import Layer, Norm
from longrnn.ops.norm import gated_rms_norm
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.ssd import PARTIAL, ScanInputs, resolve, select
from longrnn.ops.steps import UNLIMITED, step_sizes
from longrnn.state import PyTree


class Mamba2State(NamedTuple):
    """`conv`: `(b, d_conv − 1, d_inner + 2 g n)`, the last inputs of the convolution;
    `ssm`: `(b, h, p, n)`, the recurrent state, float32 or wider."""

    conv: Tensor
    ssm: Tensor


@lru_cache(maxsize=64)
def _state_like(conv: tuple[int, ...], ssm: tuple[int, ...], dtype: torch.dtype) -> Mamba2State:
    """Tensors without values, shared by all cells of these shapes: they are needed per token."""
    return Mamba2State(
        conv=torch.empty(conv, dtype=dtype, device="meta"),
        ssm=torch.empty(ssm, dtype=torch.promote_types(dtype, torch.float32), device="meta"),
    )


def _check_range(name: str, pair: list[float], *, limit: bool = False) -> None:
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
class Mamba2(ScanningMixer):
    """The Mamba-2 mixer (arXiv 2405.21060) with the weight names of the published models.

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
        backend: implementation of the recurrence: `native`, `triton`, `mamba_ssm`, `chunked` or
            `reference`; `auto` selects by the device of each call.
        init: see `longrnn.mixers.init`: `default` or `long_memory`.
    """

    recurrent_weights = ("in_proj.weight", "A_log", "dt_bias")
    wide_weights = ("A_log", "dt_bias", "D")
    projections = ("in_proj", "out_proj")

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
        super().__init__(d_input, d_model)
        for name, size in (("d_state", d_state), ("expand", expand), ("d_conv", d_conv)):
            if size < 1:
                raise UserError(f"{name} must be at least 1, not {size}: set a positive number")
        _check_range("A_init", A_init)
        if dt_limit is not None:
            _check_range("dt_limit", dt_limit, limit=True)
        _check_range("[dt_min, dt_max]", [dt_min, dt_max])
        if not (norm_eps >= 0 and math.isfinite(norm_eps)):
            raise UserError(f"norm_eps must be at least 0 and finite, not {norm_eps}: give 1e-5")
        d_inner = expand * d_model
        if head_dim < 1 or d_inner % head_dim:
            raise UserError(
                f"head_dim {head_dim} does not divide expand · d_model = {d_inner}: set another "
                "head_dim"
            )
        self.n_heads = d_inner // head_dim
        if n_groups < 1 or self.n_heads % n_groups:
            raise UserError(
                f"n_groups {n_groups} does not divide the {self.n_heads} heads: set another "
                "n_groups"
            )
        self.d_inner, self.d_state, self.head_dim = d_inner, d_state, head_dim
        self.n_groups, self.d_conv, self.norm_eps = n_groups, d_conv, norm_eps
        # A tuple, because a change in place of a list would not be noticed by kernels that keep it.
        self.dt_limit = None if dt_limit is None else (dt_limit[0], dt_limit[1])
        self.backend, self.ssd = backend, select(backend)
        self.reads_device = backend in PARTIAL  # these check their inputs

        self.d_xBC = d_inner + 2 * n_groups * d_state
        self.in_proj = Linear(d_input, d_inner + self.d_xBC + self.n_heads, bias=bias)
        self.conv1d = nn.Conv1d(self.d_xBC, self.d_xBC, d_conv, groups=self.d_xBC, bias=conv_bias)
        log_dt = torch.empty(self.n_heads).uniform_(math.log(dt_min), math.log(dt_max))
        dt = log_dt.exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(*A_init).log())
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = nn.RMSNorm(d_inner, eps=norm_eps)
        self.out_proj = Linear(d_inner, d_model, bias=bias)
        initialise(self, init)

    def backend_on(self, device: torch.device) -> str:
        """The name of the backend that computes the recurrence on a device."""
        return resolve(self.backend, device.type)

    def watch_channels(self, observe: Callable[[Tensor], None]) -> RemovableHandle:
        return self.out_proj.register_forward_pre_hook(lambda module, args: observe(args[0]))

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        self.A_log.copy_(-(scales * F.softplus(self.dt_bias)).log())  # dt · |A| = 1 / scale
        return True

    def state_like(self) -> Mamba2State:
        # Shards of a model may be gathered in a narrower dtype, but for those of the convolution.
        dtype = self.conv1d.weight.dtype
        ssm = (self.n_heads, self.head_dim, self.d_state)
        return _state_like((self.d_conv - 1, self.d_xBC), ssm, dtype)

    def run(
        self,
        x: Tensor,
        state: Mamba2State,
        edit: Edit | None,
        carry: PyTree,
        rows: PackedRows | None = None,
    ) -> tuple[Tensor, Mamba2State, PyTree]:
        projected = self.in_proj(x)
        backend = self.backend_on(projected.device)
        at_once = {"native": self._fused, "triton": self._token}.get(backend)
        if at_once is not None and edit is None and rows is None:
            found = at_once(projected, state)
            if found is not None:
                return self.out_proj(found[0]), found[1], carry
        z, xBC, dt = projected.split([self.d_inner, self.d_xBC, self.n_heads], dim=-1)
        xBC, conv = self._convolved(xBC, state.conv, rows, backend)
        if rows is not None:
            xBC = rows.without_padding(xBC)
        inner, B, C = self._split(xBC)
        limit, dtype = self._dt_range(), state.ssm.dtype
        dt = step_sizes(dt, self.dt_bias, limit, dtype, fused=backend == "triton")
        steps = Steps(inner, dt, self.rates().to(dtype))
        y, ssm, carry = self.recur(steps, B, C, state.ssm, edit, carry, rows)
        gated = self.gated(y.flatten(2), z, inner, backend)
        return self.out_proj(gated), Mamba2State(conv, ssm), carry

    def _convolved(
        self, xBC: Tensor, before: Tensor, rows: PackedRows | None, backend: str
    ) -> tuple[Tensor, Tensor]:
        """The convolution of x B C with its activation, and its state after the last token."""
        weight, bias = own_weight(self.conv1d)[:, 0], self.conv1d.bias
        if backend == "native" and rows is None:
            found = parts.convolution(xBC, weight, bias, before)
            if found is not None:
                return found
        fused = backend == "triton"
        return causal_conv(xBC, weight, bias, before, activation=True, rows=rows, fused=fused)

    def gated(self, y: Tensor, z: Tensor, inner: Tensor | None, backend: str) -> Tensor:
        """The input of the output projection: y + D x, gated by z and normalised.

        Args:
            y: `(b, t, d_inner)`.
            z: `(b, t, d_inner)`.
            inner: x `(b, t, h, p)`; None if y contains D x.
            backend: that of the call.
        """
        weight, eps, fused = own_weight(self.norm), self.norm_eps, backend == "triton"
        if backend == "native" and inner is not None:
            found = parts.gated_norm(y, z, inner, self.D, weight, eps, self.n_groups)
            if found is not None:
                return found
        skip = None if inner is None else (inner, self.D)
        return gated_rms_norm(y, z, weight, eps, self.n_groups, skip=skip, fused=fused)

    def _token(self, projected: Tensor, state: Mamba2State) -> tuple[Tensor, Mamba2State] | None:
        """Computes one token between the projections in two Triton kernels.

        Returns None for several tokens, for gradients, and where the kernels do not run.
        """
        weights = (
            *(own_weight(self.conv1d), self.conv1d.bias, self.dt_bias, self.A_log, self.D),
            *(state.conv, state.ssm),
        )
        tracked = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in (projected, *weights)
        )
        if projected.shape[1] != 1 or tracked or not gpu_kernels.runs(True, projected, *weights):
            return None
        from longrnn.ops.triton import token

        y, conv, ssm = token.step(
            projected,
            token.Weights(weights[0][:, 0], *weights[1:5]),
            state.conv,
            state.ssm,
            groups=self.n_groups,
            dt_limit=self._dt_range(),
        )
        z = projected[..., : self.d_inner]
        return self.gated(y, z, None, "triton"), Mamba2State(conv, ssm)

    def _dt_range(self) -> tuple[float, float]:
        """Least and largest dt."""
        return UNLIMITED if self.dt_limit is None else self.dt_limit

    def _fused(self, projected: Tensor, state: Mamba2State) -> tuple[Tensor, Mamba2State] | None:
        """Computes everything between the projections in C++; None if that is not possible."""
        inputs = CellInputs(projected, self._weights(), state.conv, state.ssm)
        found = fused_cell(inputs, self._options())
        return None if found is None else (found.y, Mamba2State(found.conv, found.state))

    def residual_layer(self, norm: Norm) -> Layer | None:
        before, after = self.in_proj, self.out_proj
        native = self.backend_on(torch.device("cpu")) == "native"
        if not native or not {type(before), type(after)} <= set(NATIVE):
            return None
        projections = before.stored(), after.stored()
        return Layer(norm, projections, self._weights(), *self._options(), *self.state_like())

    def _weights(self) -> Weights:
        """The parameters between the projections."""
        weight, bias = own_weight(self.conv1d), self.conv1d.bias
        return Weights(weight, bias, self.dt_bias, self.A_log, self.D, own_weight(self.norm))

    def _options(self) -> CellOptions:
        return CellOptions(self.n_groups, self.norm_eps, self._dt_range())

    def _split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inner x `(b, t, h, p)`, B and C `(b, t, g, n)`."""
        groups = self.n_groups * self.d_state
        inner, B, C = xBC.split([self.d_inner, groups, groups], dim=-1)
        inner = inner.unflatten(-1, (self.n_heads, self.head_dim))
        B = B.unflatten(-1, (self.n_groups, self.d_state))
        return inner, B, C.unflatten(-1, (self.n_groups, self.d_state))

    def memory(self, state: Mamba2State) -> Tensor:
        return state.ssm

    def with_memory(self, state: Mamba2State, memory: Tensor) -> Mamba2State:
        return state._replace(ssm=memory)

    def recent(self, state: Mamba2State) -> Tensor:
        return state.conv

    def recent_of(self, x: Tensor) -> Tensor:
        return self.in_proj(x)[..., self.d_inner : self.d_inner + self.d_xBC]

    def with_recent(self, state: Mamba2State, recent: Tensor) -> Mamba2State:
        return state._replace(conv=recent)

    def rates(self) -> Tensor:
        wide = torch.promote_types(self.A_log.dtype, torch.float32)
        return -self.A_log.to(wide).exp()

    def inputs_like(self) -> ScanInputs:
        narrow, wide = self.conv1d.weight.dtype, self.state_like().ssm.dtype

        def meta(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(1, *shape, dtype=dtype, device="meta")

        return ScanInputs(
            x=meta(self.n_heads, self.head_dim, dtype=narrow),
            gain=meta(self.n_heads, dtype=wide),
            log_decay=meta(self.n_heads, dtype=wide),
            B=meta(self.n_groups, self.d_state, dtype=narrow),
            C=meta(self.n_groups, self.d_state, dtype=narrow),
        )

    def extra_repr(self) -> str:
        backend = self.backend_on(self.A_log.device)
        return f"n_heads={self.n_heads}, d_state={self.d_state}, backend={backend}"
