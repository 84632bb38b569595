"""Lightning attention: linear attention with one constant decay per head.

For every head, with the memory h `(p, n)` and a slope s > 0 that no input changes:

    h_t = exp(−s) h_{t−1} + v_t k_tᵀ,   y_t = h_t q_t
    (q, k, v) = silu(W x),   output = W_o (σ(W_g x) · rms_norm(y))

The norm is over all heads. In a mitigation the step dt is 1 for every token, and the rate A is −s.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.cells.edit import Edit, Steps
from longrnn.hf.hybrid.shared_cell import LayerCell
from longrnn.ops.norm import rms_norm
from longrnn.ops.rows import Rows
from longrnn.ops.scan.inputs import Decay


class LightningState(NamedTuple):
    """`ssm`: `(b, h, p, n)`, the memory of every head, float32 or wider."""

    ssm: Tensor


class LightningRest(NamedTuple):
    """`B` and `C`: `(b, t, h, n)`, k and q; `gate`: `(b, t, h p)`, before its sigmoid."""

    B: Tensor
    C: Tensor
    gate: Tensor


class LightningAttention(LayerCell):
    """The layer of MiniMax (arXiv 2501.08313, section 2.2; arXiv 2401.04658).

    Args:
        layer: a `MiniMaxLightningAttention`.
    """

    constant_step = True
    recurrent_weights = ("layer.qkv_proj.weight",)
    wide_weights = ("slope_rate",)
    shown = ("n_heads", "head_dim")

    def __init__(self, layer: Any, _: Any = None) -> None:
        super().__init__(layer, layer.qkv_proj.in_features)
        self.n_heads, self.head_dim = layer.num_attention_heads, layer.head_dim

    def before(
        self, x: Tensor, state: LightningState, edit: Edit, rows: Rows | None
    ) -> tuple[Steps, LightningRest]:
        """Computes queries, keys, values and gates."""
        dtype, layer = state.ssm.dtype, self.layer
        mixed = layer.act_fn(layer.qkv_proj(x)).unflatten(-1, (self.n_heads, -1)).to(dtype)
        q, k, v = mixed.split(self.head_dim, dim=-1)
        rate = -layer.slope_rate.to(dtype).flatten()
        dt = torch.ones_like(v[..., 0])
        return Steps(v, dt, Decay(dt, rate)), LightningRest(k, q, layer.output_gate(x))

    def after(
        self, y: Tensor, rest: LightningRest, memory: Tensor
    ) -> tuple[Tensor, LightningState]:
        """Computes the output of the layer."""
        norm = self.layer.norm
        normed = rms_norm(y.flatten(2), norm.weight, norm.variance_epsilon)
        gated = normed * rest.gate.to(y.dtype).sigmoid()
        return self.layer.out_proj(gated.to(rest.gate.dtype)), LightningState(memory)

    def state_like(self) -> LightningState:
        dtype = self.wide_dtype(self.layer.out_proj.weight)
        sizes = self.n_heads, self.head_dim, self.head_dim
        return LightningState(torch.empty(sizes, dtype=dtype, device="meta"))
