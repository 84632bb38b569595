"""Time of the chunked scan on the CPU for several values of CHUNK and SEGMENT.

The two constants were chosen with these measurements. Prints milliseconds for the shape of
mamba2-130m (forward) and for the tiny models that are trained on a CPU (forward and backward), then
the time of one training step of the tiny model with the current constants (`--no-train` skips it).

Example:
    python -m benchmarks.ssd_chunk_cpu
    python -m benchmarks.ssd_chunk_cpu --chunks 32 64 --segments 512 --repeats 3 --no-train
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from longrnn.ops.ssd import ScanInputs, chunked
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import add_threads, interleaved, use_threads, write_json
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM


class Shape(NamedTuple):
    batch: int
    time: int
    heads: int
    head_dim: int
    d_state: int
    backward: bool


SHAPES = {
    "130m, 1 x 1024": Shape(1, 1024, 24, 64, 128, False),
    "tiny, 16 x 1024": Shape(16, 1024, 4, 64, 32, False),
    "tiny, 16 x 256, backward": Shape(16, 256, 4, 64, 32, True),
    "tiny, 4 x 1024, backward": Shape(4, 1024, 4, 64, 32, True),
    "tiny, 16 x 1024, backward": Shape(16, 1024, 4, 64, 32, True),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--segments", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-train", action="store_true", help="skip the training step")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    add_threads(parser)
    return parser.parse_args()


def draw(shape: Shape) -> tuple[ScanInputs, Tensor]:
    """Returns random inputs whose decays range from slow to fast, as in a trained model."""
    torch.manual_seed(0)
    b, t, h, p, n, backward = shape
    x, B, C = torch.randn(b, t, h * p + 2 * n).split([h * p, n, n], dim=-1)
    log_decay = -3 * torch.rand(b, t, h) ** 3
    inputs = (x.unflatten(-1, (h, p)), torch.ones(b, t, h), log_decay, B[:, :, None], C[:, :, None])
    state = torch.randn(b, h, p, n)
    return (
        ScanInputs(*(tensor.detach().requires_grad_(backward) for tensor in inputs)),
        state.requires_grad_(backward),
    )


def scan_milliseconds(shape: Shape, args: argparse.Namespace) -> dict[str, float]:
    """Returns the time of the scan for every pair "chunk/segment"."""
    inputs, state = draw(shape)

    def scan(chunk: int, segment: int) -> None:
        chunked.CHUNK, chunked.SEGMENT = chunk, segment
        y, final = chunked.ssd(inputs, state)
        if shape.backward:
            torch.autograd.grad(y.sum() + final.sum(), [*inputs, state])

    pairs = [(c, s) for c in args.chunks for s in args.segments if c <= s]
    calls = {f"{c}/{s}": lambda c=c, s=s: scan(c, s) for c, s in pairs}
    kept = chunked.CHUNK, chunked.SEGMENT
    try:
        seconds = interleaved(calls, args.repeats)
    finally:
        chunked.CHUNK, chunked.SEGMENT = kept
    return {name: 1e3 * value for name, value in seconds.items()}


def step_milliseconds(repeats: int) -> dict[str, float]:
    """Returns the time of one forward and backward pass of the tiny model, per shape."""
    torch.manual_seed(0)
    mixer = {"kind": "mamba2", "d_state": 32, "head_dim": 64}
    model = RecurrentLM(RecurrentConfig(256, 128, 2, mixer))

    def step(batch: int, time: int) -> None:
        tokens = torch.randint(256, (batch, time + 1))
        model.zero_grad()
        logits = model(tokens[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    shapes = {"16 x 256": (16, 256), "4 x 1024": (4, 1024)}
    calls = {name: lambda shape=shape: step(*shape) for name, shape in shapes.items()}
    return {name: 1e3 * value for name, value in interleaved(calls, repeats).items()}


def main() -> None:
    args = arguments()
    use_threads(args)
    figures: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        figures[name] = scan_milliseconds(shape, args)
        if len(figures) == 1:
            print(f"{'ms of chunk/segment':28}" + "".join(f"{key:>10}" for key in figures[name]))
        print(f"{name:28}" + "".join(f"{value:10.1f}" for value in figures[name].values()))
    if not args.no_train:
        figures["training step of the tiny model"] = step_milliseconds(args.repeats)
        for name, value in figures["training step of the tiny model"].items():
            print(f"training step of the tiny model, {name}: {value:.0f} ms")
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
