"""Peak memory and time per token of the perplexity of 4k and of a million tokens.

python -m benchmarks.evaluation_cpu perplexity --threads 1
python -m benchmarks.evaluation_cpu perplexity --scale 16        # 64k instead of a million

Each length runs in a separate process, with random bytes and `passkey-tiny`, and calls the same
function as `longrnn eval perplexity`.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.timing import add_threads, clock, in_a_process, use_threads, write_json
from longrnn import load
from longrnn.evaluation.perplexity import evaluate
from longrnn.evaluation.texts import Document

CHECKPOINT = "passkey-tiny"
SHORT, LONG = 4096, 2**20
# Largest permitted peak memory of the long text relative to the short one.
BAR = 1.10


def one(length: int) -> dict[str, float]:
    """Returns seconds, peak memory in MiB and the loss of one text, measured in this process."""
    tokens = torch.randint(256, (length + 1,), generator=torch.Generator().manual_seed(0))
    document = Document("random", f"{length}", tokens, torch.arange(1, length + 2))
    model = load(CHECKPOINT)
    with TemporaryDirectory() as folder:
        start = clock()
        (row,) = evaluate(model, [document], length=length, output=Path(folder) / "r.jsonl")
        seconds = clock() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"seconds": seconds, "peak_mib": peak, "nats_per_token": row["nats_per_token"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scale", type=int, default=1, help="divide the length of the long text by this number"
    )
    parser.add_argument("--length-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    add_threads(parser)
    args = parser.parse_args()
    use_threads(args)
    if args.length_of:
        print(json.dumps(one(args.length_of)))
        return
    figures: dict[str, dict[str, float] | float] = {}
    found = {}
    for name, length in (("short", SHORT), ("long", LONG // args.scale)):
        command = ["benchmarks.evaluation_cpu.perplexity"]
        command += ["--length-of", str(length), "--threads", str(torch.get_num_threads())]
        found[name] = in_a_process(*command)
        figures[name] = {"tokens": length, **found[name]}
        print(
            f"{length:,} tokens: {found[name]['peak_mib']:.0f} MiB at peak, "
            f"{found[name]['seconds'] / length * 1e6:.0f} us per token",
            flush=True,
        )
    figures["peak_ratio"] = found["long"]["peak_mib"] / found["short"]["peak_mib"]
    print(f"peak memory {figures['peak_ratio']:.3f} x (at most {BAR})")
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
