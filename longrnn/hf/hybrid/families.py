"""How the recurrent layers of each Hugging Face architecture map onto cells of this project.

A cell takes its weights from the layer. Layers that map onto the same cell have the same
attributes. The table lists what differs: the class of the layer, and what surrounds its input
projections and the head.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import KDA, GatedDeltaNet, Mamba, Mamba2
from longrnn.cells.weights import WHOLE, Part
from longrnn.hf.hybrid.lightning import LightningAttention
from longrnn.hf.hybrid.mlstm import MLSTM
from longrnn.hf.hybrid.rg_lru import RGLRU
from longrnn.hf.hybrid.shared_cell import SharedCell, of_layer
from longrnn.ops.gated_norm import GATED_NORM
from longrnn.ops.hooks import own_weight
from longrnn.ops.scan.inputs import Decay


class Family(NamedTuple):
    """The recurrent layers of one architecture.

    Attributes:
        layer: name of their class.
        cell: the class of our cells on their weights.
        project: computes what the cell's own `in_proj` would, from a layer and its input; None for
            the layer's own `in_proj`.
        steps: names of the weights that make steps and gates; none where the cell's own names hold.
        logit_scale: returns the number that the logits are multiplied by, from a configuration.
        soft_cap: name of the option that limits them.
        window: name of the option that gives layers of full attention a window; None for none.
    """

    layer: str
    cell: type[Any]
    project: Callable[[Any, Tensor], Tensor] | None = None
    steps: tuple[str, ...] = ()
    logit_scale: Callable[[Any], float] = lambda config: 1.0
    soft_cap: str | None = None
    window: str | None = None


class SharedMamba(SharedCell, Mamba):
    """A `Mamba` cell on the weights of a layer; see `SharedCell`."""

    recurrent_weights = ("layer.A_log",)
    bias_weight, dt_weight = "layer.dt_proj.bias", "layer.dt_proj.weight"
    x_proj, dt_proj = of_layer("x_proj"), of_layer("dt_proj")

    def __init__(self, theirs: Any, family: Any) -> None:
        super().__init__(theirs, family)
        self.n_heads, self.n_groups = theirs.intermediate_size, 1
        self.d_state, self.d_conv = theirs.ssm_state_size, theirs.conv_kernel_size
        self.dt_rank, self.select_norm_eps = theirs.time_step_rank, None


class SharedJamba(SharedMamba):
    """The same for a Jamba (arXiv 2403.19887), whose norms of δ, B and C have weights."""

    def normed(self, delta: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        return layer.dt_layernorm(delta), layer.b_layernorm(B), layer.c_layernorm(C)


class SharedZamba(SharedMamba):
    """The same for a Zamba (arXiv 2405.16712), whose groups of channels select on their own."""

    wide_weights = ("A_log", "D", "dt_proj_bias")
    bias_weight, dt_weight = "layer.dt_proj_bias", "layer.dt_proj_weight"
    dt_proj_bias = of_layer("dt_proj_bias")
    A_log = property(lambda cell: cell.layer.A_log.flatten(0, 1))
    D = property(lambda cell: cell.layer.D.flatten())

    def __init__(self, theirs: Any, family: Any) -> None:
        super().__init__(theirs, family)
        self.n_groups = theirs.n_mamba_heads

    @property
    def step_weights(self) -> dict[str, Part]:
        delta: Part = (slice(None), slice(self.dt_rank))
        return {"layer.x_proj_weight": delta, "layer.dt_proj_weight": WHOLE}

    def select(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        layer, sizes = self.layer, [self.dt_rank, self.d_state, self.d_state]
        by_group = x.unflatten(-1, (self.n_groups, -1))
        selected = torch.einsum("btgp,grp->btgr", by_group, layer.x_proj_weight)
        delta, B, C = selected.split(sizes, dim=-1)
        dt = torch.einsum("btgr,gpr->btgp", delta, layer.dt_proj_weight)
        return (dt.to(dtype) + layer.dt_proj_bias.to(dtype)).flatten(2), B.to(dtype), C.to(dtype)


class SharedMamba2(SharedCell, Mamba2):
    """A `Mamba2` cell on the weights of a layer; see `SharedCell`."""

    dt_weight = "layer.in_proj.weight"

    def __init__(self, theirs: Any, family: Family) -> None:
        super().__init__(theirs, family)
        self.n_heads, self.head_dim = theirs.num_heads, theirs.head_dim
        self.d_inner, self.d_state = theirs.intermediate_size, theirs.ssm_state_size
        self.n_groups, self.d_conv = theirs.n_groups, theirs.conv_kernel_size
        self.d_xBC = self.d_inner + 2 * self.n_groups * self.d_state
        least, largest = theirs.time_step_limit
        self.dt_limit = float(least), float(largest)
        norm = theirs.norm
        if not hasattr(norm, "weight"):
            return
        self.norm_eps = norm.variance_epsilon
        self.norm_groups = getattr(norm, "n_groups", None) or self.d_inner // norm.group_size

    def gate(self, y: Tensor, z: Tensor, x: Tensor) -> Tensor:
        norm, D = self.layer.norm, self.D
        has_norm = hasattr(norm, "weight")
        if has_norm and not getattr(norm, "norm_before_gate", False):
            weight, groups = own_weight(norm), self.norm_groups
            return GATED_NORM(self.backend, y, z, x, D, weight, self.norm_eps, groups)
        dtype = torch.promote_types(y.dtype, torch.float32)
        inner = torch.addcmul(y.to(dtype), x.to(dtype), D.to(dtype)[:, None]).flatten(2)
        if has_norm:
            grouped = inner.unflatten(-1, (self.norm_groups, -1))
            normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.norm_eps)
            inner = normed.flatten(-2) * own_weight(norm)
        return (inner * F.silu(z.to(dtype))).to(z.dtype)


class SharedGatedDeltaNet(SharedCell, GatedDeltaNet):
    """A `GatedDeltaNet` cell on the weights of a layer; see `SharedCell`."""

    def __init__(self, theirs: Any, family: Family) -> None:
        super().__init__(theirs, family)
        self.n_heads, self.n_key_heads = theirs.num_v_heads, theirs.num_k_heads
        self.key_dim, self.value_dim = theirs.head_k_dim, theirs.head_v_dim
        self.d_conv = theirs.conv_kernel_size
        self.largest_beta = 2.0 if getattr(theirs, "allow_neg_eigval", False) else 1.0
        keys, values = self.n_key_heads * self.key_dim, self.n_heads * self.value_dim
        self.in_sizes = [2 * keys + values, values, self.n_heads, self.n_heads]
        self.norm_eps = self.norm.variance_epsilon


class SharedOlmoHybrid(SharedGatedDeltaNet):
    """The same for an OLMo-Hybrid, where two modules have other names."""

    norm, out_proj = of_layer("o_norm"), of_layer("o_proj")


class SharedKDA(SharedCell, KDA):
    """A `KDA` cell on the weights of a layer; see `SharedCell`."""

    rate_weight, bias_weight = "layer.forget_gate.A_log", "layer.forget_gate.dt_bias"
    A_log, dt_bias = of_layer("forget_gate.A_log"), of_layer("forget_gate.dt_bias")
    decay_proj, gate_proj = of_layer("forget_gate.f_b_proj"), of_layer("g_b_proj")
    norm, out_proj = of_layer("o_norm"), of_layer("o_proj")

    def __init__(self, theirs: Any, family: Family) -> None:
        super().__init__(theirs, family)
        self.n_heads, self.n_key_heads = theirs.num_heads, theirs.num_heads
        self.key_dim, self.value_dim = theirs.head_dim, theirs.head_dim
        self.d_conv = theirs.conv_kernel_size
        self.in_sizes = [3 * theirs.qkv_dim, theirs.head_dim, theirs.head_dim, theirs.num_heads]
        self.norm_eps = self.norm.variance_epsilon


class SharedBailing(SharedKDA):
    """The same for a Bailing hybrid, whose projections of decays and gate have full rank.

    By default its decays are bounded: log α = l · σ(exp(A_log) · (W_α a + dt_bias)) with l < 0. In
    a mitigation, A is then l.
    """

    decay_proj, gate_proj = of_layer("forget_gate.f_proj"), of_layer("g_proj")

    def __init__(self, theirs: Any, family: Family) -> None:
        super().__init__(theirs, family)
        self.in_sizes[1:3] = [theirs.hidden_size] * 2
        if theirs.forget_gate.safe_gate:
            self.rate_weight = None

    def decay(self, inputs: Tensor, rate: Tensor) -> Decay:
        gate = self.layer.forget_gate
        if not gate.safe_gate:
            return super().decay(inputs, rate)
        bound = torch.full_like(rate, gate.lower_bound)
        return Decay((inputs * rate[:, None]).sigmoid(), bound)


def _scaled(theirs: Any, x: Tensor) -> Tensor:
    """The projection of a Falcon-H1: its input and every output are multiplied by constants."""
    return theirs.in_proj(x * theirs.ssm_in_multiplier) * theirs.mup_vector


def _by_key_head(theirs: Any, x: Tensor) -> Tensor:
    """The projections of a Qwen3-Next, whose outputs are grouped by key head."""
    grouped = theirs.in_proj_qkvz(x), theirs.in_proj_ba(x)
    parts = theirs.fix_query_key_value_ordering(*grouped)
    return torch.cat([part.flatten(2) for part in parts], dim=-1)


def _by_channel(theirs: Any, x: Tensor) -> Tensor:
    """The projection of a Zamba, whose outputs x and z of each channel are side by side."""
    return theirs.in_proj(x).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _joined(names: str, theirs: Any, x: Tensor) -> Tensor:
    """The outputs of several projections side by side."""
    return torch.cat([attrgetter(name)(theirs)(x) for name in names.split()], dim=-1)


def _with_input(theirs: Any, x: Tensor) -> Tensor:
    """The projections of a Bailing hybrid, and its input, of which decays and gate are made."""
    return torch.cat(
        [theirs.q_proj(x), theirs.k_proj(x), theirs.v_proj(x), x, x, theirs.b_proj(x)], -1
    )


_BA, _B_AND_A = ("in_proj_ba.weight",), ("in_proj_b.weight", "in_proj_a.weight")
_OLMO_STEPS = ("b_proj.weight", "a_proj.weight")
_FULL_RANK = ("forget_gate.f_proj.weight", "b_proj.weight")
_DECAYS = ("forget_gate.f_a_proj.weight", "forget_gate.f_b_proj.weight", "b_proj.weight")
_OLMO = partial(_joined, "q_proj k_proj v_proj g_proj b_proj a_proj")
_KIMI = partial(_joined, "q_proj k_proj v_proj forget_gate.f_a_proj g_a_proj b_proj")
_QWEN3_5 = partial(_joined, "in_proj_qkv in_proj_z in_proj_b in_proj_a")

# By the `model_type` of a configuration.
FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        "BailingHybridDeltaAttention",
        SharedBailing,
        _with_input,
        _FULL_RANK,
    ),
    "bamba": Family("BambaMixer", SharedMamba2),
    "falcon_h1": Family(
        "FalconH1Mixer",
        SharedMamba2,
        _scaled,
        logit_scale=lambda config: config.lm_head_multiplier,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridMambaLayer",
        SharedMamba2,
        logit_scale=lambda config: 1 / config.logits_scaling,
    ),
    "jamba": Family("JambaMambaMixer", SharedJamba),
    "kimi_linear": Family("KimiLinearDeltaAttention", SharedKDA, _KIMI, _DECAYS),
    "minimax": Family("MiniMaxLightningAttention", LightningAttention, window="sliding_window"),
    "nemotron_h": Family("NemotronHMamba2Mixer", SharedMamba2),
    "olmo_hybrid": Family("OlmoHybridGatedDeltaNet", SharedOlmoHybrid, _OLMO, _OLMO_STEPS),
    "qwen3_5_moe_text": Family("Qwen3_5MoeGatedDeltaNet", SharedGatedDeltaNet, _QWEN3_5, _B_AND_A),
    "qwen3_5_text": Family("Qwen3_5GatedDeltaNet", SharedGatedDeltaNet, _QWEN3_5, _B_AND_A),
    "qwen3_next": Family("Qwen3NextGatedDeltaNet", SharedGatedDeltaNet, _by_key_head, _BA),
    "recurrent_gemma": Family("RecurrentGemmaRecurrentBlock", RGLRU, soft_cap="logits_soft_cap"),
    "xlstm": Family("xLSTMLayer", MLSTM, soft_cap="output_logit_soft_cap"),
    "zamba": Family("ZambaMambaMixer", SharedZamba, _by_channel),
    "zamba2": Family("Zamba2MambaMixer", SharedMamba2),
}


def wide_weights(kind: str) -> AbstractContextManager[Any]:
    """In this context, transformers loads the weights of recurrences in float32.

    In a narrower dtype, which the others may have, slow decays would be rounded away.

    Args:
        kind: the model type; for one without a family nothing changes.
    """
    # A model of images and text is loaded without its images.
    family = FAMILIES.get(kind, FAMILIES.get(f"{kind}_text"))
    if family is None:
        return nullcontext()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    name = "_keep_in_fp32_modules_strict"
    kept = [*(getattr(cls, name) or ()), *family.cell.wide_weights]
    return patch.object(cls, name, kept)
