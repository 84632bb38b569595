"""Training steps on packed and on padded rows on the CPU, compared with rows of one document.

Forward and backward pass of a small Mamba-2 in float32. The rows have the same tokens in all
variants, and the packed ones hold documents of random lengths.

Example:
    python -m benchmarks.packing_cpu --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import add_threads, interleaved, use_threads, write_json
from longrnn.models import RecurrentConfig, RecurrentLM

PLAIN = "rows of one document"
# Highest permitted time of packed rows relative to rows of one document.
BAR = 1.15


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixer", default="mamba2")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per row")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[100, 20], help="mean lengths of the documents"
    )
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    add_threads(parser)
    return parser.parse_args()


def starts(rows: int, tokens: int, length: int) -> Tensor:
    """Starts of documents of 1 to 2 · length − 1 tokens, `(rows, tokens)`."""
    randomness = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * length, (rows, tokens), generator=randomness)
    bounds = lengths.cumsum(1) - lengths
    is_start = torch.zeros(rows, tokens, dtype=torch.bool)
    row, document = (bounds < tokens).nonzero(as_tuple=True)
    is_start[row, bounds[row, document]] = True
    return is_start


def main() -> None:
    args = arguments()
    use_threads(args)
    torch.manual_seed(0)
    config = RecurrentConfig(
        vocab_size=args.vocab,
        d_model=args.d_model,
        n_layers=args.layers,
        mixer={"kind": args.mixer},
    )
    model = RecurrentLM(config)
    tokens = torch.randint(args.vocab, (args.rows, args.tokens))
    is_token = torch.ones_like(tokens, dtype=torch.bool)
    is_token[0, : args.tokens // 10] = False

    def step(**masks: Any) -> None:
        model.zero_grad()
        hidden, _ = model.hidden(tokens, **masks)
        hidden.square().mean().backward()

    calls: dict[str, Callable[[], None]] = {PLAIN: step}
    for length in args.lengths:
        packed = starts(args.rows, args.tokens, length)
        name = f"{int(packed.sum())} packed documents"
        calls[name] = lambda packed=packed: step(is_document_start=packed)
    calls["a row with 10 % padding"] = lambda: step(is_token=is_token)
    seconds = interleaved(calls, args.repeats, warm=True)
    for name, time in seconds.items():
        print(f"{name:28} {1e3 * time:8.1f} ms   x {time / seconds[PLAIN]:.2f}")
    print(f"bar for packed documents of Mamba-2: x {BAR}")
    if args.json:
        write_json(args.json, seconds)


if __name__ == "__main__":
    main()
