"""The layers that only hybrids have, one token at a time, from the equations of their papers.

See `tests.mitigations.definitions`, whose chains of mitigations these apply.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.hf.hybrid.lightning import LightningState
from longrnn.hf.hybrid.mlstm import MLSTMState
from longrnn.hf.hybrid.rg_lru import RGLRUState
from tests.mitigations.definitions import Definition


def lightning(
    layer: Any, chain: Definition, x: Tensor, state: LightningState
) -> tuple[Tensor, LightningState]:
    """MiniMax-01, section 2.2: the step is 1, and the rate minus the slope of the head."""
    heads, n = layer.num_attention_heads, layer.head_dim
    q, k, v = F.silu(x @ layer.qkv_proj.weight.T).view(-1, heads, 3 * n).split(n, dim=-1)
    step = torch.ones(len(x), heads, 1, 1, dtype=x.dtype)
    outer = v[..., :, None] * k[..., None, :]
    h = chain.scanned(step, -layer.slope_rate.view(heads, 1, 1), outer, state.ssm)
    y = (h * q[..., None, :]).sum(-1).flatten(1)
    y = y / (y.square().mean(-1, keepdim=True) + layer.norm.variance_epsilon).sqrt()
    y = y * layer.norm.weight * (x @ layer.output_gate.weight.T).sigmoid()
    return y @ layer.out_proj.weight.T, LightningState(h)


def rg_lru(
    layer: Any, chain: Definition, x: Tensor, state: RGLRUState
) -> tuple[Tensor, RGLRUState]:
    """Griffin, section 2.4: the step is r, and the factor of the input follows the decay."""
    unit = layer.rg_lru
    branch = x @ layer.linear_x.weight.T + layer.linear_x.bias
    seen = torch.cat([state.conv, branch[:, None]], dim=1)
    u = (seen * layer.conv_1d.weight[:, 0].T).sum(1) + layer.conv_1d.bias

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return (u @ torch.block_diag(*weight) + bias.flatten()).sigmoid()

    r = gate(unit.recurrent_gate_weight, chain.added("bias", unit.recurrent_gate_bias))
    i = gate(unit.input_gate_weight, unit.input_gate_bias)
    rate = -8 * (1 + unit.recurrent_param.exp()).log()
    dt, A = chain.steps(r[..., None, None], rate[:, None, None])
    log_a = (dt * A).clamp(max=-1e-30)  # whose square root has a gradient
    gain = torch.where(state.has_read[:, None, None, None], (-torch.expm1(2 * log_a)).sqrt(), 1.0)
    read = torch.where(dt == 0, 0.0, (i * u)[..., None, None])
    h = chain.stepped((dt * A).exp(), gain * read, state.ssm)
    y = h[..., 0, 0] * F.gelu(x @ layer.linear_y.weight.T + layer.linear_y.bias, approximate="tanh")
    y = y @ layer.linear_out.weight.T + layer.linear_out.bias
    return y, RGLRUState(seen[:, 1:], h, torch.ones_like(state.has_read))


def mlstm(layer: Any, chain: Definition, x: Tensor, state: MLSTMState) -> tuple[Tensor, MLSTMState]:
    """xLSTM, section 2.3 and appendix A: forget and input gates, and the stabiliser of both."""
    config, heads = layer.config, layer.config.num_heads

    def gate(linear: Any, bias: Tensor) -> Tensor:
        value = x @ linear.weight.T + bias
        cap = config.gate_soft_cap
        return (value if cap is None else cap * (value / cap).tanh())[..., None, None]

    def by_head(linear: Any) -> Tensor:
        return (x @ linear.weight.T).view(len(x), heads, -1)

    q, k, v = by_head(layer.q), by_head(layer.k), by_head(layer.v)
    forget, factor = chain.multiplied(
        gate(layer.fgate_preact, chain.added("bias", layer.fgate_preact.bias)).sigmoid(),
        torch.ones(len(x), heads, 1, 1, dtype=x.dtype),
    )
    assert forget is not None
    log_input = gate(layer.igate_preact, layer.igate_preact.bias) + factor.log()
    m = state.stabiliser[..., None, None]
    new = torch.maximum(forget.log() + m, log_input)
    keep, add = (forget.log() + m - new).exp(), (log_input - new).exp()
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    added = add * v[..., :, None] * k[..., None, :]
    memory = chain.redefined(keep * state.ssm + added, keep, added)
    *_, n = k.shape
    read = (memory @ q[..., None])[..., 0] / n**0.5
    y = read[..., :-1] / (read[..., -1:].abs().maximum((-new[..., 0]).exp()) + config.eps)
    y = (y - y.mean(-1, keepdim=True)) / (
        y.var(-1, correction=0, keepdim=True) + config.norm_eps
    ).sqrt()
    y = y.flatten(1) * layer.multihead_norm.weight
    y = y * (x @ layer.ogate_preact.weight.T).sigmoid()
    return y @ layer.out_proj.weight.T, MLSTMState(memory, new[..., 0, 0])


# By the `model_type` of a configuration.
LAYERS: dict[str, Any] = {"minimax": lightning, "recurrent_gemma": rg_lru, "xlstm": mlstm}
