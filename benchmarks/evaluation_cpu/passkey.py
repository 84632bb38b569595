"""Passkey grids with shared prefixes, compared with processing every prompt separately.

python -m benchmarks.evaluation_cpu passkey --threads 1
python -m benchmarks.evaluation_cpu passkey --scale 16           # every length divided by 16

Evaluates `passkey-tiny` on two grids with ten keys per cell: eight lengths that double up to 64k ×
depths 0, ¼, ½, ¾, 1; and insertion points every 8k tokens × 16 equally spaced lengths up to 64k.
Both methods use the same batch size; the benchmark checks that their answers are equal.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longrnn.evaluation.passkey_grid import Grid

from benchmarks.timing import add_threads, clock, use_threads, write_json
from longrnn.evaluation.passkey import cost, evaluate
from longrnn.hf.opened import OpenCheckpoint, open_checkpoint

CHECKPOINT = "passkey-tiny"
# Lowest permitted factors by which tokens and time are reduced.
BARS = {"depths": (2.7, 2.2), "insertion points": (10.0, 6.0)}


def grids(scale: int = 1, n: int = 10) -> dict[str, Grid]:
    """Returns the grids of BARS; `scale` divides every length, lengths below 256 are omitted."""
    longest, step = 65536 // scale, 8192 // scale
    doubling = [longest >> power for power in range(7, -1, -1)]
    even = [longest // 16 * k for k in range(1, 17)]
    return {
        "depths": Grid([t for t in doubling if t >= 256], n, depths=[0, 0.25, 0.5, 0.75, 1]),
        "insertion points": Grid(
            [t for t in even if t >= 256], n, insert_at=list(range(0, longest - 256, step))
        ),
    }


def measure(grid: Grid, subject: OpenCheckpoint, batch_size: int) -> dict[str, Any]:
    """Returns tokens and seconds of both methods after checking that the answers are equal."""
    counted = cost([subject], grid)[subject.name]
    seconds, answers = {}, {}
    with TemporaryDirectory() as folder:
        for name, naive in (("shared", False), ("naive", True)):
            start = clock()
            rows = evaluate(
                [subject],
                grid,
                output=Path(folder) / f"{name}.jsonl",
                naive=naive,
                batch_size=batch_size,
            )
            seconds[name], answers[name] = clock() - start, rows
    different = sum(a != b for a, b in zip(answers["shared"], answers["naive"], strict=True))
    assert different == 0, f"{different} answers differ"
    return {
        "prompts": len(answers["naive"]),
        "recalled": sum(row["correct"] for row in answers["shared"]) / len(answers["shared"]),
        "tokens_shared": counted.shared,
        "tokens_naive": counted.naive,
        "seconds_shared": seconds["shared"],
        "seconds_naive": seconds["naive"],
        "fewer_tokens": counted.ratio,
        "less_time": seconds["naive"] / seconds["shared"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="divide every length by this number")
    parser.add_argument("--keys", type=int, default=10, help="prompts per cell")
    parser.add_argument("--batch-size", type=int, default=10, help="rows per batch")
    parser.add_argument("--grid", choices=BARS, help="run only this grid (default: both)")
    parser.add_argument("--json", type=Path)
    add_threads(parser)
    args = parser.parse_args()
    use_threads(args)
    subject = open_checkpoint(CHECKPOINT)
    figures: dict[str, Any] = {"scale": args.scale, "batch_size": args.batch_size}
    for name, grid in grids(args.scale, args.keys).items():
        if args.grid in (None, name):
            figures[name] = found = measure(grid, subject, args.batch_size)
            tokens, time = BARS[name]
            print(
                f"{name}: {found['prompts']} prompts, {found['recalled']:.3f} recalled; "
                f"{found['tokens_shared']:,} tokens of {found['tokens_naive']:,}, "
                f"{found['fewer_tokens']:.2f} x fewer (at least {tokens}); "
                f"{found['seconds_shared']:.1f} s of {found['seconds_naive']:.1f} s, "
                f"{found['less_time']:.2f} x less (at least {time})",
                flush=True,
            )
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
