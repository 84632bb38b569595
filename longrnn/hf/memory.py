"""Gives a transformer a recurrent memory: a Mamba-2 beside the attention of its layers.

The result is a Falcon-H1 (arXiv 2507.22448): its layer is that of a LLaMA, with a Mamba-2 that
reads the same input and whose output is added to that of attention. So it is an ordinary
checkpoint, which transformers runs, and which `load` opens as a `HybridLM`.

A head of the memory begins with the projections of the head of attention beside it (as in arXiv
2408.15237): C from its queries, B from its keys, x from its values. Its output projection is 0, so
that the new model computes what the transformer does. A Falcon-H1 has a Mamba-2 in every layer: in
one without a memory all of its weights are 0, and longrnn neither computes nor trains it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import FalconH1Config, FalconH1ForCausalLM
from transformers.initialization import no_init_weights

from longrnn.errors import UserError
from longrnn.hf.hybrid.layers import MEMORIES_KEY
from longrnn.programs import reason_of

# Weights of a LLaMA by the names that they have in a Falcon-H1.
RENAMED = (
    (r"\.mlp\.", ".feed_forward."),
    (r"\.post_attention_layernorm\.", ".pre_ff_layernorm."),
    (r"^model\.norm\.", "model.final_layernorm."),
)
# Options of a configuration that mean the same in both.
SHARED_OPTIONS = (
    *("vocab_size", "tie_word_embeddings", "hidden_size", "intermediate_size", "hidden_act"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
    *("rope_parameters", "max_position_embeddings", "initializer_range"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
SILU_NAMES = ("silu", "swish")  # that a Mamba-2 has too
MEMORY = ".mamba."  # in the names of its weights
# silu of this is 1: the gate of the memory is open at the start.
OPEN_GATE = 1.2784645427610738


def with_memory(
    base: Any, *, shortest: int, longest: int, layers: Sequence[int] | None = None
) -> FalconH1ForCausalLM:
    """Returns a Falcon-H1 with the weights of a transformer, and memories whose output is 0.

    Args:
        base: a causal Hugging Face model with the layers of a LLaMA, such as a LLaMA or Qwen2.
        shortest: tokens in which the first head of each memory loses half of a value.
        longest: the same of the last head; those between are spaced geometrically.
        layers: the numbers of those with a memory; None for all.

    Raises:
        UserError: the model has layers that a Falcon-H1 does not compute, or not the given ones.
    """
    options = shared_options(base)
    heads, size = options["num_attention_heads"], options["head_dim"]
    config = FalconH1Config(
        **options,
        mamba_d_ssm=heads * size,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        num_logits_to_keep=None,
    )
    weights = {}
    for name, weight in base.state_dict().items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        weights[name] = weight
    used = range(len(base.model.layers)) if layers is None else layers
    model: Any = with_weights(base, FalconH1ForCausalLM, config, weights)
    begin_memories(base, model, used, shortest=shortest, longest=longest)
    if layers is not None:
        setattr(config, MEMORIES_KEY, list(layers))
    compare(base, model)
    return model


def shared_options(base: Any) -> dict[str, Any]:
    """The options of a configuration with the layers of a LLaMA, and of a Mamba-2 with its heads.

    Raises:
        UserError: the model has other layers.
    """
    given, kind = base.config.to_dict(), base.config.model_type
    if absent := [name for name in SHARED_OPTIONS if name not in given]:
        raise refusal(kind, f"its configuration has no {absent[0]}")
    if base.config.hidden_act not in SILU_NAMES:
        raise refusal(kind, f"its activation is {base.config.hidden_act}")
    if getattr(base.config, "sliding_window", None) is not None:
        raise refusal(kind, "its attention has a window of its own")
    heads = base.config.num_attention_heads
    size = given.get("head_dim") or base.config.hidden_size // heads
    return {name: given.get(name) for name in SHARED_OPTIONS} | {
        "head_dim": size,
        "attention_bias": any(name.endswith("q_proj.bias") for name in base.state_dict()),
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": heads,
        "mamba_d_state": size,
        "mamba_proj_bias": True,
    }


def with_weights(base: Any, cls: Any, config: Any, weights: Mapping[str, Tensor]) -> Any:
    """Returns a model with the weights of a transformer, and 0 for all others.

    Args:
        base: the transformer.
        cls: of the model.
        config: of the model.
        weights: of the transformer, by their names in the model.

    Raises:
        UserError: the model has no place for a weight, or needs others than those of a Mamba-2 and
            biases of attention.
    """
    kind = base.config.model_type
    with no_init_weights():  # all of them are set below
        model: Any = cls(config).to(base.dtype).eval()
    try:
        missing, unknown = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of weights of another shape
        raise refusal(kind, reason_of(error)) from error
    # LLaMA-like models may have biases in some projections of attention only.
    own = {name for name in missing if name.endswith("_proj.bias") or MEMORY in name}
    if differing := {*missing, *unknown} - own:
        raise refusal(kind, f"it differs in {min(differing)}")
    for name in own:
        nn.init.zeros_(model.get_parameter(name))
    return model


@torch.no_grad()
def begin_memories(
    base: Any, model: Any, layers: Sequence[int], *, shortest: int, longest: int
) -> None:
    """Gives memories, whose weights are 0, the projections of attention, and leaves their output 0.

    Args:
        base: the transformer.
        model: with the memories.
        layers: the numbers of those that get them.
        shortest: see `with_memory`.
        longest: likewise.

    Raises:
        UserError: the transformer does not have these layers.
    """
    count = len(base.model.layers)
    if max(layers) >= count:
        raise UserError(
            f"this {base.config.model_type} has the layers 0 to {count - 1}, and {max(layers)} is "
            "to get a memory: give layers that it has"
        )
    for number in layers:
        memory, attention = model.model.layers[number].mamba, base.model.layers[number].self_attn
        heads, size = memory.num_heads, memory.head_dim
        width = heads * size
        parts = {
            "x": (attention.v_proj, slice(width, 2 * width)),
            "B": (attention.k_proj, slice(2 * width, 3 * width)),
            "C": (attention.q_proj, slice(3 * width, 4 * width)),
        }
        for projection, rows in parts.values():
            for name in ("weight", "bias"):
                given = getattr(projection, name)
                if given is not None:
                    by_head = given.unflatten(0, (-1, size))
                    repeated = by_head.repeat_interleave(heads // len(by_head), dim=0)
                    getattr(memory.in_proj, name)[rows] = repeated.flatten(0, 1)
        memory.in_proj.bias[:width] = OPEN_GATE
        memory.conv1d.weight[:, 0, -1] = 1  # the current token alone
        memory.norm.weight.fill_(1)
        # A = -1, so that a step of log 2 / n halves a value in n tokens; the inverse of softplus.
        half_lives = torch.logspace(
            math.log10(shortest), math.log10(longest), heads, dtype=torch.float64
        )
        memory.dt_bias.copy_((math.log(2) / half_lives).expm1().log())


@torch.no_grad()
def compare(base: Any, model: Any) -> None:
    """Raises a UserError if the two models do not compute the same."""
    tokens = (torch.arange(32) * 7 % base.config.vocab_size).view(2, 16)
    expected, found = (each(input_ids=tokens, use_cache=False).logits for each in (base, model))
    tolerance = 100 * torch.finfo(base.dtype).eps * float(expected.abs().max())
    difference = float((expected - found).abs().max())
    if not difference <= tolerance:
        raise refusal(base.config.model_type, f"its logits differ by {difference:.2g}")


def refusal(kind: str, reason: str) -> UserError:
    """Returns the error for a model that cannot be given a memory."""
    return UserError(
        f"this {kind} cannot be given a memory, because its layers are not those of a LLaMA "
        f"({reason}): give a LLaMA, Mistral, Qwen2 or SmolLM2"
    )
