"""A transformer, a Mamba-2 and an LSTM with about the same number of parameters, over bytes."""

from __future__ import annotations

from typing import Any

from longrnn.errors import UserError, nearest

VOCABULARY = 256
# By the number of parameters: sizes of the transformer, and widths of the Mamba-2 and the LSTM.
SIZES: dict[str, tuple[dict[str, int], int, int]] = {
    "250k": ({"hidden_size": 96, "intermediate_size": 264, "num_attention_heads": 4}, 128, 116),
    "120k": ({"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}, 84, 80),
}
NAMES = ("transformer", "mamba2", "lstm")


def shapes(size: str) -> dict[str, dict[str, Any]]:
    """Return the model of a training configuration for each of `NAMES`, with two layers each.

    Args:
        size: a key of `SIZES`.

    Raises:
        UserError: an unknown size.
    """
    if size not in SIZES:
        raise UserError(f"no models of size {size!r}: {nearest(size, SIZES)}")
    transformer, mamba2, lstm = SIZES[size]
    common = {"vocab_size": VOCABULARY, "n_layers": 2}
    heads = {"kind": "mamba2", "d_state": 32, "head_dim": mamba2 // 2}
    return {
        "transformer": {
            "transformer": {
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "num_hidden_layers": 2,
                "tie_word_embeddings": True,
                **transformer,
            }
        },
        "mamba2": {"model": {**common, "d_model": mamba2, "mixer": heads}},
        "lstm": {"model": {**common, "d_model": lstm, "mixer": {"kind": "lstm"}}},
    }
