"""A Gated DeltaNet layer on the CPU, beside the torch path of the same layer in transformers.

Prefill from a given state, and decoding one token at a time, at the sizes of half a layer of
Qwen3-Next. The calls are interleaved, and the weights are random.

Example:
    python -m benchmarks.gated_deltanet_cpu --threads 1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.timing import add_threads, interleaved, use_threads
from longrnn.cells import GatedDeltaNet

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16, help="values, and twice the keys")
    parser.add_argument("--size", type=int, default=128, help="length of keys and values")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prefill")
    parser.add_argument("--steps", type=int, default=16, help="tokens that are decoded")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a small layer, once: does it run?")
    add_threads(parser)
    args = parser.parse_args()
    if args.quick:
        vars(args).update(d_model=32, heads=4, size=8, tokens=70, steps=2, repeats=1)
    return args


def layers(args: argparse.Namespace) -> tuple[GatedDeltaNet, Any, Any]:
    """Our layer, that of transformers, and a function that makes a cache of the latter."""
    from transformers import DynamicCache, Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    for name in RULES:  # not the Triton kernels of flash-linear-attention, which it would choose
        rule = getattr(module, name)
        setattr(module, name, getattr(rule, "__wrapped__", rule))
    sizes = {"n_key_heads": args.heads // 2, "key_dim": args.size, "value_dim": args.size}
    ours = GatedDeltaNet(args.d_model, args.d_model, n_heads=args.heads, **sizes)
    config = Qwen3NextConfig(
        hidden_size=args.d_model,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_value_heads=args.heads,
        linear_num_key_heads=args.heads // 2,
        linear_key_head_dim=args.size,
        linear_value_head_dim=args.size,
    )
    return ours, module.Qwen3NextGatedDeltaNet(config, 0), lambda: DynamicCache(config=config)


@torch.no_grad()
def main() -> None:
    args = arguments()
    use_threads(args)
    ours, theirs, new_cache = layers(args)
    text = torch.randn(1, args.tokens, args.d_model)
    state, cache = ours(text, ours.init_state(1))[1], new_cache()
    theirs(text, cache_params=cache)

    def decode() -> None:
        after = state
        for token in text[:, : args.steps].split(1, dim=1):
            _, after = ours(token, after)

    def decode_theirs() -> None:
        for token in text[:, : args.steps].split(1, dim=1):
            theirs(token, cache_params=cache)

    for title, tokens, calls in (
        ("prefill", args.tokens, (lambda: ours(text, state), lambda: theirs(text))),
        ("decoding", args.steps, (decode, decode_theirs)),
    ):
        seconds = interleaved(dict(zip(("ours", "transformers"), calls, strict=True)), args.repeats)
        rates = ", ".join(f"{name} {tokens / one:,.0f} tokens/s" for name, one in seconds.items())
        print(
            f"{title}: {rates}, ratio {seconds['transformers'] / seconds['ours']:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
