"""Replaces the attention of some layers of a transformer by a Mamba-2.

The result is a GraniteMoeHybrid without experts, whose multipliers are 1 and whose attention
rotates: its layers are those of a LLaMA, with a Mamba-2 in the place of attention in some. So it is
an ordinary checkpoint, which transformers runs, and which `load` opens as a `HybridLM`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from longrnn.hf.attention_window import AttentionWindow
from longrnn.hf.memory import begin_memories, compare, refusal, shared_options, with_weights


def with_replaced(
    base: Any, layers: Sequence[int], *, shortest: int, longest: int
) -> GraniteMoeHybridForCausalLM:
    """Returns a GraniteMoeHybrid in whose given layers a Mamba-2 that returns 0 is the attention.

    Args:
        base: see `with_memory`.
        layers: their numbers; without any, the model computes what the transformer does.
        shortest: see `with_memory`.
        longest: likewise.

    Raises:
        UserError: the model has layers that a GraniteMoeHybrid does not compute.
    """
    options, count = shared_options(base), len(base.model.layers)
    heads, size = options["num_attention_heads"], options["head_dim"]
    if heads * size != options["hidden_size"]:
        raise refusal(base.config.model_type, f"{heads} heads of {size} are not its width")
    config = GraniteMoeHybridConfig(
        **options,
        shared_intermediate_size=options["intermediate_size"],
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        attention_multiplier=size**-0.5,
        layer_types=["linear_attention" if n in layers else "full_attention" for n in range(count)],
        mamba_expand=1,
    )
    weights = {
        name: weight
        for name, weight in base.state_dict().items()
        if not any(f".{number}.self_attn." in name for number in layers)
    }
    for number in range(count):
        mlp = f"model.layers.{number}.mlp"
        pair = [weights.pop(f"{mlp}.{name}.weight") for name in ("gate_proj", "up_proj")]
        shared = f"model.layers.{number}.shared_mlp"
        weights[f"{shared}.input_linear.weight"] = torch.cat(pair)
        weights[f"{shared}.output_linear.weight"] = weights.pop(f"{mlp}.down_proj.weight")
    model: Any = with_weights(base, GraniteMoeHybridForCausalLM, config, weights)
    if layers:
        begin_memories(base, model, layers, shortest=shortest, longest=longest)
    handles = [base.model.layers[n].self_attn.register_forward_hook(_silence) for n in layers]
    try:
        compare(base, model)
    finally:
        for handle in handles:
            handle.remove()
    return model


def _silence(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """What attention returns, with an output of 0."""
    return torch.zeros_like(output[0]), *output[1:]


@torch.no_grad()
def restorations(
    model: Any, tokens: Tensor, targets: Tensor, weights: Tensor, window: AttentionWindow
) -> list[float]:
    """How much full attention in each single layer lowers the loss, when all others have a window.

    Args:
        model: a `ForeignLM`.
        tokens: `(b, t)`.
        targets: `(b, t)`, −100 where there is none.
        weights: `(b, t)`, of the losses in their sum.
        window: of the other layers.

    Returns:
        By layer, in nats.
    """

    def loss(restored: int | None) -> float:
        windowed = model.attending(window)
        windows = enumerate(windowed.attention.windows)
        windowed.attention.windows = [
            AttentionWindow() if number == restored else each for number, each in windows
        ]
        logits = windowed(tokens).logits.float()
        return float((weights * F.cross_entropy(logits.mT, targets, reduction="none")).sum())

    base = loss(None)
    return [base - loss(number) for number in range(len(model.model.model.layers))]
