"""Decoding of one row through `AutoModelForCausalLM.from_pretrained(folder).generate` on the CPU.

The same random weights in the shape of mamba2-130m, once as a checkpoint of longrnn and once as a
Hugging Face `Mamba2ForCausalLM`. Both generate greedily from the same prompt; their tokens are
compared. The time of the prompt is measured apart and subtracted.

Example:
    python -m benchmarks.generate_cpu --threads 1 --json benchmarks/results/generate_cpu.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import longrnn.hf.auto  # noqa: F401  (registers the Auto classes)
from benchmarks.prefill_cpu import build, draw, transformers_twin
from benchmarks.timing import add_threads, interleaved, use_threads, write_json

# Lowest permitted speed relative to transformers.
BAR = 1.2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50_288)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that are generated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    add_threads(parser)
    args = parser.parse_args()
    use_threads(args)
    models = saved_and_loaded(args)
    prompt = draw(args, args.prompt)
    found = {name: generated(model, prompt, args.tokens) for name, model in models.items()}
    same = bool(torch.equal(found["longrnn"], found["transformers"]))
    calls = {
        f"{name}, {count}": lambda model=model, count=count: generated(model, prompt, count)
        for count in (1, args.tokens)
        for name, model in models.items()
    }
    seconds = interleaved(calls, args.repeats, warm=True)
    per_token = {
        name: (seconds[f"{name}, {args.tokens}"] - seconds[f"{name}, 1"]) / (args.tokens - 1)
        for name in models
    }
    ratio = per_token["transformers"] / per_token["longrnn"]
    for name, time in per_token.items():
        print(f"{name:<14}{1000 * time:8.2f} ms per token, {1 / time:8.1f} tokens/s")
    print(f"ratio {ratio:.2f} (at least {BAR} is required), the same tokens: {same}")
    if args.json is not None:
        figures = {"ms_per_token": {n: 1000 * t for n, t in per_token.items()}, "ratio": ratio}
        write_json(args.json, {**figures, "same_tokens": same, "n": args.repeats})


def saved_and_loaded(args: argparse.Namespace) -> dict[str, Any]:
    """Returns both models as `AutoModelForCausalLM` opens their checkpoints."""
    from transformers import AutoModelForCausalLM

    from longrnn.hf.auto import LongRNNForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = build(args)
        LongRNNForCausalLM.of(model).save_pretrained(f"{folder}/longrnn")
        transformers_twin(model).save_pretrained(f"{folder}/transformers")
        del model
        return {
            name: AutoModelForCausalLM.from_pretrained(f"{folder}/{name}").eval()
            for name in ("longrnn", "transformers")
        }


def generated(model: Any, prompt: Tensor, count: int) -> Tensor:
    """Returns exactly `count` greedily generated tokens."""
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    mask = torch.ones_like(prompt)
    found = model.generate(
        prompt, attention_mask=mask, pad_token_id=0, eos_token_id=None, **options
    )
    return found[:, prompt.shape[1] :]


if __name__ == "__main__":
    main()
