"""Passkey grids with shared prefixes, and the same prompts read one by one.

python -m benchmarks.evaluation_cpu passkey --threads 1
python -m benchmarks.evaluation_cpu passkey --scale 16           # a sixteenth of every length

Two grids of `passkey-tiny`, ten keys a cell: eight lengths that double up to 64k × depths 0, ¼, ½,
¾, 1; and a key every 8k × 16 even lengths up to 64k. Both ways read batches of the same number of
rows and give the same answers, which is checked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.timing import add_threads, clock, use_threads, write_json
from longrnn.evaluation.passkey import cost, evaluate
from longrnn.evaluation.passkey_grid import Grid
from longrnn.hf.opened import OpenCheckpoint, open_checkpoint

CHECKPOINT = "passkey-tiny"
# At least so many times fewer tokens, and so many times less time.
BARS = {"depths": (2.7, 2.2), "insertion points": (10.0, 6.0)}


def grids(scale: int = 1, n: int = 10) -> dict[str, Grid]:
    """The grids of BARS; `scale` divides every length, and those without room are left out."""
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
    """Tokens and seconds both ways, after a check that the answers are equal."""
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
    parser.add_argument("--scale", type=int, default=1, help="divide every length by this")
    parser.add_argument("--keys", type=int, default=10, help="prompts a cell")
    parser.add_argument("--batch-size", type=int, default=10, help="rows of a batch, both ways")
    parser.add_argument("--grid", choices=BARS, help="one of the two; both where left out")
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
                f"{found['fewer_tokens']:.2f} x fewer (bar {tokens}); "
                f"{found['seconds_shared']:.1f} s of {found['seconds_naive']:.1f} s, "
                f"{found['less_time']:.2f} x less (bar {time})",
                flush=True,
            )
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
