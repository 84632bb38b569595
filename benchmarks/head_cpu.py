"""Time and peak memory of head and cross-entropy on the CPU, chunked and with all logits at once.

Measures the forward and backward pass of the loss alone, from the hidden states to the gradients of
the hidden states and the head, for 64 rows of 64 tokens. `all logits` computes
`F.cross_entropy(F.linear(hidden, head))`. `2^k` computes at most that many logits at once. Each
peak is measured in a separate process, relative to the memory in use before the loss.

Example:
    python -m benchmarks.head_cpu --threads 1 --json benchmarks/results/head_cpu.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from longrnn.ops.cross_entropy import weighted_cross_entropy
from torch.nn import functional as F

from benchmarks.prefill_cpu import mebibytes
from benchmarks.timing import add_threads, in_a_process, interleaved, use_threads, write_json

WAYS = ("all logits", "2^21", "2^22", "2^23", "2^24")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, nargs="+", default=[16_384, 50_288])
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # used by child processes
    add_threads(parser)
    return parser.parse_args()


def prepare(args: argparse.Namespace, vocab: int, way: str) -> Callable[[], float]:
    """Returns a function that runs the loss and its backward pass on random inputs."""
    torch.manual_seed(0)
    hidden = torch.randn(args.rows, args.tokens, args.d_model, requires_grad=True)
    head = torch.nn.Parameter(torch.randn(vocab, args.d_model) * args.d_model**-0.5)
    targets = torch.randint(vocab, (args.rows, args.tokens))
    weights = torch.full(targets.shape, 1 / targets.numel())

    def run() -> float:
        hidden.grad = head.grad = None
        if way == "all logits":
            logits = F.linear(hidden, head)
            per_token = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            loss = (per_token * weights.flatten()).sum()
            logits.detach().argmax(-1)
        else:
            size = 2 ** int(way.removeprefix("2^"))
            loss = weighted_cross_entropy(hidden, head, targets, weights, max_logits=size).loss
        loss.backward()
        return loss.item()

    return run


def peak(args: argparse.Namespace, vocab: int, way: str) -> float:
    """Returns the peak memory of the loss in MiB above the start, in a separate process."""
    shape = {"vocab": vocab, "d-model": args.d_model, "rows": args.rows, "tokens": args.tokens}
    options = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    command = ["benchmarks.head_cpu", *options, "--memory-of", way]
    command += ["--threads", str(torch.get_num_threads())]
    return in_a_process(*command)


def main() -> None:
    args = arguments()
    use_threads(args)
    if args.memory_of:
        run = prepare(args, args.vocab[0], args.memory_of)
        before, _ = mebibytes()
        run()
        print(json.dumps(mebibytes()[1] - before))
        return
    figures: dict[str, dict[str, float]] = {}
    # Measured first: the peak memory of a child process starts at the value of its parent.
    peaks = {(vocab, way): peak(args, vocab, way) for vocab in args.vocab for way in WAYS}
    for vocab in args.vocab:
        calls = {way: prepare(args, vocab, way) for way in WAYS}
        losses = [call() for call in calls.values()]
        assert max(losses) - min(losses) < 1e-3, losses
        seconds = interleaved(calls, args.repeats, warm=True)
        print(f"vocabulary {vocab:,}, {args.rows} × {args.tokens} tokens")
        for way in WAYS:
            figures[f"{vocab}, {way}"] = {"seconds": seconds[way], "peak_mib": peaks[vocab, way]}
            print(f"  {way:12} {seconds[way]:7.2f} s {peaks[vocab, way]:8.0f} MiB")
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
