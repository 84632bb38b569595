"""Peak memory on the CPU.

| case | what is measured |
| --- | --- |
| cells | time per token and peak memory of a long text in pieces, for every cell |
| train | bytes of live tensors per token of a training step, with and without checkpointing |

Example:
    python -m benchmarks.memory cells --layers 2 --d-model 128 --vocab 256 --long 1048576
    python -m benchmarks.memory train --layers 12 --d-model 512 --vocab 8192
"""

from __future__ import annotations

import argparse
import resource
import weakref
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.models import build, draw
from benchmarks.timing import clock, parser, write_json
from longrnn import MIXERS
from longrnn.data.batch import Batch, row_starts
from longrnn.training.objective import Objective

PIECE = 4096


def arguments() -> argparse.Namespace:
    options = parser(__doc__, repeats=1)
    options.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
    options.add_argument("--tokens", type=int, default=4096, help="length of a row")
    options.add_argument("--long", type=int, default=65_536, help="length of the long text")
    return options.parse_args()


def reading(args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Reads `--long` tokens in pieces, after one that is not timed.

    Returns:
        Tokens read, microseconds per token since the last entry, and the peak memory so far in
        MiB, four times as many tokens per entry.
    """
    torch.set_num_threads(args.threads)
    model, state, entries = build(args), None, list[tuple[int, float, float]]()
    pieces = draw(args.vocab, args.long).split(PIECE, dim=1)
    with torch.inference_mode():
        model(pieces[0], keep=0)
        start, last, due = clock(), 0, PIECE
        for count, piece in enumerate(pieces, 1):
            state = model(piece, state, keep=0).state
            if count * PIECE == due:
                seconds = (clock() - start) / (due - last)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
                entries.append((due, 1e6 * seconds, peak))
                start, last, due = clock(), due, 4 * due
    return entries


def cells(args: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns `reading` of every cell, each in a process of its own."""
    found = {}
    for cell in MIXERS:
        args.cell = cell
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found[cell] = process.submit(reading, args).result()
        entries = (f"{n:,}: {us:.1f} µs, {mib:.0f} MiB" for n, us, mib in found[cell])
        print(f"{cell}, time per token and peak memory: {'; '.join(entries)}", flush=True)
    return found


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations create in this context, and their peak.

    The count is the same in every run, unlike the resident memory of a process, which depends on
    the allocator. Memory that an operation uses only inside its kernel is not seen.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                storage = leaf.untyped_storage()
                self._known[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._remove, storage._cdata)
        return result

    def _remove(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Returns MiB per token as differences of two lengths, so that the weights are left out."""
    figures = {}
    print("MiB per token: kept by the forward pass, peak of forward and backward pass")
    for every in ("no", "block"):
        found = []
        for length in (args.tokens, 2 * args.tokens):
            model = build(args).train()
            model.gradient_checkpointing_enable(every == "block")
            ids = draw(args.vocab, length + 1)
            batch = Batch(ids[:, :-1], ids[:, 1:], row_starts(ids[:, 1:]))
            with LiveBytes(list(model.parameters())) as live:
                output = Objective(model)([batch], None)
                kept = live.now
                output.loss.backward()
            found.append((kept, live.peak))
            del output
        per_token = [(b - a) / args.tokens / 2**20 for a, b in zip(*found, strict=True)]
        print(f"  gradient_checkpointing={every:6} {per_token[0]:.3f} {per_token[1]:.3f}")
        figures[every] = per_token
    return figures


CASES = {"cells": cells, "train": training}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    figures = {case: CASES[case](args) for case in args.cases}
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
