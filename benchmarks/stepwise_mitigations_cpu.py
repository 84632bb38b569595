"""RNN, GRU and LSTM without gradients on the CPU: the C++ loop, and the Python loop over hooks.

One layer of embedding and cell, random weights, float32, without logits. Calls are interleaved.
"Products alone" are those of both weights with all tokens of a segment at once, by oneDNN: what a
cell computes one token after another cannot be faster.

Example:
    python -m benchmarks.stepwise_mitigations_cpu --threads 1
    python -m benchmarks.stepwise_mitigations_cpu --threads 1 --d-model 512 --rows 16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import add_threads, interleaved, use_threads, write_json
from longrnn.errors import UserError
from longrnn.mitigations import Mitigated, mitigation
from longrnn.cells import TorchCell
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.models.segments import segment_width
from longrnn.ops import native
from longrnn.ops.linear import linear

KINDS = ("rnn", "gru", "lstm")
SPECS = ("forget_more", "state_norm(threshold=1.0)", "sliding_window(window=64)")
# Least speed of the C++ loop relative to the Python loop under a mitigation.
BAR = 10


@contextmanager
def without_kernels() -> Iterator[None]:
    """Computes without the C++ kernels."""
    before, native.available = native.available, lambda: False
    try:
        yield
    finally:
        native.available = before


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    add_threads(parser)
    return parser.parse_args()


def measure(args: argparse.Namespace, kind: str) -> dict[str, float]:
    """Tokens per second of the plain model and under every mitigation that is defined."""
    torch.manual_seed(0)
    config = RecurrentConfig(256, args.d_model, 1, {"kind": kind}, block="plain")
    plain = RecurrentLM(config).eval()
    models: dict[str, Any] = {"plain": plain}
    for spec in SPECS:
        try:
            models[spec] = Mitigated(plain, mitigation(spec))
        except UserError:
            continue  # not defined for this cell
    tokens = torch.randint(256, (args.rows, args.tokens))
    calls: dict[str, Callable[[], object]] = {}
    for name, model in models.items():

        def python(model: Any = model) -> None:
            with without_kernels():
                model(tokens, keep=0)

        calls[f"{name}, C++"] = lambda model=model: model(tokens, keep=0)
        calls[f"{name}, without"] = python
    calls["products alone"] = lambda: products(plain, args.rows, args.tokens)
    seconds = interleaved(calls, args.repeats)
    speeds = {name: tokens.numel() / value for name, value in seconds.items()}
    bound = speeds["products alone"]
    print(f"{kind:5} {'products alone':28} {bound:9.0f} tokens/s")
    for name in models:
        ours, other = speeds[f"{name}, C++"], speeds[f"{name}, without"]
        bar = "" if name == "plain" else f" (at least {BAR})"
        shares = f"{ours / other:5.1f} x without{bar}, {ours / bound:.0%} of the products alone"
        print(f"{kind:5} {name:28} {ours:9.0f} tokens/s   {shares}")
    return {f"{kind}/{name}": speed for name, speed in speeds.items()}


def products(model: RecurrentLM, rows: int, tokens: int) -> None:
    """The products of a prefill with the weights of input and recurrence, in its segments."""
    (mixer,) = model.cells
    assert isinstance(mixer, TorchCell)
    weights = mixer.cell.all_weights[0][:2]
    width = segment_width(rows, weights[0].device, mixer.d_model)
    for start in range(0, tokens, width):
        x = torch.ones(rows * min(width, tokens - start), mixer.d_model)
        for weight in weights:
            linear(x, weight)


@torch.inference_mode()
def main() -> None:
    args = arguments()
    use_threads(args)
    figures: dict[str, float] = {}
    for kind in KINDS:
        figures |= measure(args, kind)
    if args.json:
        write_json(args.json, {**figures, "d_model": args.d_model, "rows": args.rows})


if __name__ == "__main__":
    main()
