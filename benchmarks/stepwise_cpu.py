"""Training steps of RNN, GRU and LSTM on the CPU, compared with the modules of torch.nn.

Measures forward pass, backward pass, gradient clipping and optimizer step on reverse ordering, for
a model of embedding, cell and head in float32. Three variants have the same weights and batch:
- `torch.nn`: a module of torch.nn with `nn.Embedding`, `nn.Linear` and `F.cross_entropy`;
- `longrnn`: our model and loss (logits only at targets), with the kernel of torch.nn;
- `stepwise`: our model with an edit that requires the state after every token, as mitigations do.

Also measures the peak memory of one step at a large vocabulary, each in a separate process.

Example:
    python -m benchmarks.stepwise_cpu --threads 1 --json benchmarks/results/stepwise_cpu.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.prefill_cpu import mebibytes
from benchmarks.timing import add_threads, in_a_process, interleaved, use_threads, write_json
from benchmarks.training_cpu import stepper
from longrnn.cells import Edit, init_carries
from longrnn.data import TASKS, Batch
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.state import LMState
from longrnn.training.objective import Objective

PEERS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
# Lowest permitted speed relative to torch.nn.
BARS = {"longrnn": 0.9, "stepwise": 0.5}
WAYS = ("torch.nn", *BARS)


class Twin(nn.Module):
    """The same model, built only from modules of torch.nn, with a copy of our weights."""

    def __init__(self, model: RecurrentLM) -> None:
        super().__init__()
        config = model.config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.cell = PEERS[config.mixer["kind"]](config.d_model, config.d_model, batch_first=True)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.embedding.load_state_dict(model.embedding.state_dict())
        self.cell.load_state_dict(model.cells[0].get_submodule("cell").state_dict())
        self.head.load_state_dict(model.head.state_dict())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embedding(tokens))[0])


class Stepwise(RecurrentLM):
    """A model that computes the state after every token, as mitigations require."""

    def hidden(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        edits: Sequence[Edit] | None = None,
        **options: Any,
    ) -> tuple[Tensor, LMState]:
        identity = [Edit()] * len(self.cells)
        start = self.init_state(len(tokens)) if state is None else state
        start = start._replace(extra=init_carries(self.cells, len(tokens), identity))
        hidden, after = super().hidden(tokens, start, keep=keep, edits=identity, **options)
        return hidden, after._replace(extra=())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens per row, half of them input"
    )
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large-vocab", type=int, default=16_384, help="0 skips the memory")
    parser.add_argument("--large-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)  # used by child processes
    add_threads(parser)
    return parser.parse_args()


def draw(rows: int, tokens: int, vocab: int) -> Batch:
    """Returns a batch of sequences to reverse."""
    task = TASKS.build({"kind": "reverse", "vocab_size": vocab})
    generator = torch.Generator().manual_seed(0)
    return task.sample(rows, length=tokens // 2, generator=generator)


def training_step(
    way: str, kind: str, d_model: int, batch: Batch, vocab: int
) -> Callable[[], float]:
    """Returns a function that performs one training step and returns its loss."""
    torch.manual_seed(0)
    config = RecurrentConfig(
        vocab + 1, d_model, 1, {"kind": kind}, block="plain", tie_embeddings=False
    )
    model = (Stepwise if way == "stepwise" else RecurrentLM)(config).train()
    if way == "torch.nn":
        twin = Twin(model)

        def theirs() -> Tensor:
            logits = twin(batch.tokens)
            return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

        return stepper(twin, theirs)
    objective = Objective(model)
    return stepper(model, lambda: objective([batch], model.init_state(len(batch.tokens))).loss)


def speeds(args: argparse.Namespace, kind: str) -> dict[str, float]:
    """Returns seconds per step and speed of each variant after checking equal losses."""
    batch = draw(args.rows, args.tokens, args.vocab)
    calls = {way: training_step(way, kind, args.d_model, batch, args.vocab) for way in WAYS}
    losses = {way: [call() for _ in range(2)] for way, call in calls.items()}
    for way, found in losses.items():
        # The second loss is computed after one full step, so gradients and optimizer agree too.
        for one, other in zip(found, losses["torch.nn"], strict=True):
            assert abs(one - other) < 1e-4 * other, (way, losses)
    seconds = interleaved(calls, args.repeats, warm=True)
    figures = {f"{kind}/{way}/seconds": value for way, value in seconds.items()}
    for way, value in seconds.items():
        speed = seconds["torch.nn"] / value
        bar = f"   (at least {BARS[way]})" if way in BARS else ""
        print(f"{kind:5} {way:10} {value:7.3f} s   {speed:5.2f} x torch.nn{bar}", flush=True)
        figures[f"{kind}/{way}/speed"] = speed
    return figures


def peak(args: argparse.Namespace, way: str, kind: str) -> float:
    """Returns the peak memory of a step in MiB above the start, in a separate process."""
    options = {
        "--d-model": args.d_model,
        "--rows": args.rows,
        "--large-tokens": args.large_tokens,
        "--large-vocab": args.large_vocab,
        "--threads": torch.get_num_threads(),
    }
    command = ["benchmarks.stepwise_cpu", "--memory-of", way, kind]
    command += [str(part) for option in options.items() for part in option]
    return in_a_process(*command)


def peak_here(args: argparse.Namespace) -> float:
    """Returns the peak memory of a step in this process; the child process of `peak` calls it."""
    way, kind = args.memory_of
    batch = draw(args.rows, args.large_tokens, args.large_vocab)
    step = training_step(way, kind, args.d_model, batch, args.large_vocab)
    before, _ = mebibytes()
    step()
    return mebibytes()[1] - before


def main() -> None:
    args = arguments()
    use_threads(args)
    if args.memory_of:
        print(json.dumps(peak_here(args)))
        return
    figures: dict[str, float] = {}
    if args.large_vocab:  # first: the peak of a child starts at its parent's
        shape = f"vocabulary {args.large_vocab:,}, {args.rows} × {args.large_tokens} tokens"
        for way in ("torch.nn", "longrnn"):
            figures[f"large/{way}/peak_mib"] = mib = peak(args, way, "lstm")
            print(f"{shape}, lstm, {way:10} peak {mib:7.0f} MiB", flush=True)
    for kind in args.kinds:
        figures |= speeds(args, kind)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
