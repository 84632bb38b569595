"""Prefill of hybrids on the CPU: longrnn's Mamba-2 layers relative to those of transformers.

Small models with random weights and the head sizes of the published ones (64 channels, 128 numbers
of state), in float32, with batch size 1; both compute the logits of the last token only, on the
same weights. The largest difference of these logits is given too.

Example:
    python -m benchmarks.hybrid_prefill_cpu --threads 1
    python -m benchmarks.hybrid_prefill_cpu --kinds bamba --d-model 64 --tokens 64 --repeats 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import add_threads, interleaved, use_threads, write_json
from longrnn.hf.hybrid.model import HybridLM, open_hugging_face

HEAD_DIM = 64
SHARED: dict[str, Any] = {
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2**20,
    "mamba_d_head": HEAD_DIM,
    "mamba_d_state": 128,
}


def bamba(d_model: int) -> dict[str, Any]:
    """Options of six layers, one of them with attention."""
    heads = 2 * d_model // HEAD_DIM
    return {"num_hidden_layers": 6, "attn_layer_indices": [3], "mamba_n_heads": heads}


def falcon_h1(d_model: int) -> dict[str, Any]:
    """Options of four layers, each with attention and Mamba-2."""
    inner = 3 * d_model // 2
    heads = inner // HEAD_DIM
    return {"num_hidden_layers": 4, "mamba_d_ssm": inner, "mamba_n_heads": heads, "head_dim": 64}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {"bamba": bamba, "falcon_h1": falcon_h1}


def main() -> None:
    """Prints one line per architecture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    add_threads(parser)
    args = parser.parse_args()
    use_threads(args)
    found = {}
    for kind in args.kinds:
        found[kind] = measure(kind, args.d_model, args.tokens, args.repeats)
        print(kind, ", ".join(f"{name} {value:.3g}" for name, value in found[kind].items()))
    if args.json:
        write_json(args.json, found)


def measure(kind: str, d_model: int, tokens: int, repeats: int) -> dict[str, float]:
    """Returns the seconds of both, their ratio, and the largest difference of the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": d_model, "intermediate_size": 2 * d_model, **KINDS[kind](d_model)}
    theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHARED, **sizes))
    model = open_hugging_face(theirs.eval())
    assert isinstance(model, HybridLM)
    text = torch.randint(SHARED["vocab_size"], (1, tokens))

    @torch.no_grad()
    def transformers() -> torch.Tensor:
        return theirs(input_ids=text, use_cache=True, logits_to_keep=1).logits

    calls = {"longrnn": lambda: model(text, keep=1).logits, "transformers": transformers}
    expected = transformers()
    difference = float((calls["longrnn"]() - expected).abs().max() / expected.abs().max())
    seconds = interleaved(calls, repeats, warm=True)
    ratio = seconds["transformers"] / seconds["longrnn"]
    return {**seconds, "ratio": ratio, "difference": difference}


if __name__ == "__main__":
    main()
