"""How many tokens of a call go through all layers of a model together."""

from __future__ import annotations

import torch

# Tokens of one segment, over all rows, on a CPU: at least so many, and as many as have so many
# numbers between two layers; chosen with benchmarks/prefill_cpu.py.
SEGMENT_TOKENS, SEGMENT_NUMBERS = 512, 2**18
# The same on other devices. There every segment costs some hundred launches per layer, and FSDP
# gathers the weights of every layer once per segment.
DEVICE_SEGMENT_TOKENS = 2**16
# Logits, over all rows and tokens, that one call returns.
CALL_LOGITS = 2**25
# The same with recomputation by segment, which keeps the activations of one segment at a time.
RECOMPUTED_SEGMENT_TOKENS = 2**13


def segment_tokens(d_model: int) -> int:
    """How many tokens of all rows go through all layers together on a CPU.

    Longer segments cost fewer calls, and shorter ones stay in the caches.
    """
    return min(4 * SEGMENT_TOKENS, max(SEGMENT_TOKENS, SEGMENT_NUMBERS // d_model))


def segment_width(
    rows: int, device: torch.device, d_model: int, gradient_checkpointing: str = "no"
) -> int:
    """How many tokens of each row go through all layers together.

    Args:
        rows: of the batch.
        device: of the model.
        d_model: of the model.
        gradient_checkpointing: `no`, `block` or `segment`.
    """
    if device.type == "cpu":
        return max(64, segment_tokens(d_model) // max(1, rows))
    by_segment = gradient_checkpointing == "segment"
    tokens = RECOMPUTED_SEGMENT_TOKENS if by_segment else DEVICE_SEGMENT_TOKENS
    return max(1024, tokens // max(1, rows))
