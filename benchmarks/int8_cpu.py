"""Projections in int8 on the CPU: bits per byte of a real text, and the speed of decoding.

Bits per byte are those of an embedded checkpoint over windows of the text. Decoding is that of the
130m Mamba-2 shape with random weights in bfloat16; its calls are interleaved.

Example:
    python -m benchmarks.int8_cpu --threads 1
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.prefill_cpu import MIXER
from benchmarks.timing import add_threads, interleaved, use_threads, write_json
from longrnn.hf.loading import load
from longrnn.models.quantise import WEIGHTS
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

KINDS = (None, *WEIGHTS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", default="collapse-tiny")
    parser.add_argument("--text", type=Path, default=Path("eval/data/moby_dick_excerpt.txt"))
    parser.add_argument("--window", type=int, default=256, help="bytes per window")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50_288)
    parser.add_argument("--steps", type=int, default=4, help="tokens per measurement of decoding")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    add_threads(parser)
    return parser.parse_args()


def bits_per_byte(args: argparse.Namespace, weights: str | None) -> Tensor:
    """The mean bits per byte of each window, `(windows,)`; a byte is a token."""
    model = load(args.checkpoint, weights=weights)
    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    rows = data[: len(data) // args.window * args.window].view(-1, args.window)
    losses = []
    for part in rows.split(32):
        logits = model(part).logits[:, :-1].float()
        loss = F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none")
        losses.append(loss.mean(1) / math.log(2))
    return torch.cat(losses)


def decoding(args: argparse.Namespace, weights: str | None) -> Callable[[], None]:
    """A function that decodes some tokens."""
    torch.manual_seed(0)
    config = RecurrentConfig(args.vocab, args.d_model, args.layers, MIXER, residual_in_fp32=True)
    model = RecurrentLM(config).eval().bfloat16()
    if weights is not None:
        WEIGHTS[weights](model)
    tokens = torch.randint(args.vocab, (1, args.steps))
    start = model(tokens, keep=0).state

    def run() -> None:
        state = start
        for token in tokens.split(1, dim=1):
            state = model(token, state, keep=1).state

    return run


@torch.inference_mode()
def main() -> None:
    args = arguments()
    use_threads(args)
    figures: dict[str, float] = {}
    plain = bits_per_byte(args, None)
    for weights in KINDS:
        found = bits_per_byte(args, weights)
        change = found - plain
        error = 1.96 * change.std().item() / math.sqrt(len(change))
        print(
            f"{args.checkpoint}, weights {weights}: {found.mean():.5f} bits per byte, change "
            f"{change.mean():+.5f} ± {error:.5f} (95 %, {len(change)} windows)"
        )
        figures[f"bits per byte, {weights}"] = found.mean().item()
    seconds = interleaved({str(one): decoding(args, one) for one in KINDS}, args.repeats)
    for name, value in seconds.items():
        print(f"decoding, bfloat16, weights {name}: {args.steps / value:.1f} tokens/s")
        figures[f"decoding, {name}"] = args.steps / value
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
