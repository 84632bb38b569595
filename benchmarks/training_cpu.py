"""Training on the CPU: speed relative to transformers, cost of carried states, long runs.

The model is a Mamba-2 of 12 layers × 512 with random weights, in float32, with batch size 1.
Questions:
- How many tokens per second does it train (forward, backward and optimizer step), compared with
  `Mamba2ForCausalLM` of transformers with the same weights, loss and optimizer?
- How much faster is the backend `native` than `chunked`?
- How much time does it cost to start each step from the final state of the previous step?
- How much time does activation checkpointing cost, and how much memory does it save?
- Which part of the time is spent in matrix products?
- Are time and memory per step constant over thousands of steps of the trainer?

Example:
    python -m benchmarks.training_cpu --threads 1 --json benchmarks/results/training_cpu.json
    python -m benchmarks.training_cpu --layers 2 --d-model 128 --tokens 256 --vocab 256 --steps 200
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from longrnn.models.recompute import GRANULARITIES
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.live_bytes import LiveBytes
from benchmarks.prefill_cpu import MIXER, mebibytes, transformers_twin
from benchmarks.timing import add_threads, clock, interleaved, use_threads, write_json
from longrnn.config import build_config
from longrnn.data import Batch
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.state import detach, reset
from longrnn.training.config import TrainConfig
from longrnn.training.objective import Objective
from longrnn.training.optim import build_optimizer
from longrnn.training.trainer import Trainer

CARRIED = "longrnn, carried"
CHUNKED = "longrnn, chunked"  # the backend in plain torch
# The operators of torch that multiply matrices.
PRODUCTS = {"mkldnn::_linear_pointwise"}
PRODUCTS |= {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--vocab", type=int, nargs="+", default=[50_288, 256])
    parser.add_argument("--tokens", type=int, default=1024, help="length of the row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the trainer; 0 skips it")
    parser.add_argument("--memory", action="store_true", help="measure only the memory per token")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    add_threads(parser)
    args = parser.parse_args()
    if 0 < args.steps < 10:
        parser.error("--steps must be 0 or at least 10: the first and last fifth are compared")
    return args


def build(
    args: argparse.Namespace, vocab: int, checkpointing: str = "no", backend: str = "auto"
) -> RecurrentLM:
    """Returns a model with random weights that depend only on its shape."""
    torch.manual_seed(0)
    mixer = {**MIXER, "backend": backend}
    model = RecurrentLM(RecurrentConfig(vocab, args.d_model, args.layers, mixer)).train()
    model.gradient_checkpointing_enable(checkpointing)
    return model


def draw(args: argparse.Namespace, vocab: int) -> Batch:
    """Returns one row in which every next token is a target."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (1, args.tokens + 1), generator=generator)
    return Batch(ids[:, :-1], ids[:, 1:], torch.ones(1, dtype=torch.bool))


def stepper(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], float]:
    """Returns a function that performs one training step and returns its loss."""
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-5, weight_decay=0.1))

    def step() -> float:
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def ours(model: RecurrentLM, batch: Batch, *, carry: bool = False) -> Callable[[], float]:
    """Returns our training step; with `carry`, each starts from the detached previous state."""
    objective = Objective(model)
    zero = model.init_state(len(batch.tokens))
    state, starts = zero, ~batch.begins

    def loss() -> Tensor:
        nonlocal state
        start = reset(state, model.init_state(len(batch.tokens)), starts) if carry else zero
        output = objective([batch], start)
        state = detach(output.state)
        return output.loss

    return stepper(model, loss)


def theirs(twin: Any, batch: Batch) -> Callable[[], float]:
    """Returns the same training step for the Hugging Face model."""

    def loss() -> Tensor:
        logits = twin(batch.tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())

    return stepper(twin, loss)


def throughput(args: argparse.Namespace, vocab: int) -> dict[str, float]:
    """Returns tokens per second of each variant after checking that the losses agree."""
    batch = draw(args, vocab)
    model = build(args, vocab)
    twin = transformers_twin(model).train()
    calls = {
        "longrnn": ours(model, batch),
        CARRIED: ours(build(args, vocab), batch, carry=True),
        CHUNKED: ours(build(args, vocab, backend="chunked"), batch),
        "longrnn, block": ours(build(args, vocab, "block"), batch),
        "longrnn, segment": ours(build(args, vocab, "segment"), batch),
        "transformers": theirs(twin, batch),
    }
    losses = {name: [call() for _ in range(2)] for name, call in calls.items()}
    for name, values in losses.items():
        # The second loss is computed after one full step, so gradients and optimizer agree too.
        assert abs(values[0] - losses["longrnn"][0]) < 1e-3 * values[0], losses
        assert name == CARRIED or abs(values[1] - losses["longrnn"][1]) < 1e-3, losses
    rounds = [interleaved(calls, 1, warm=True) for _ in range(args.repeats)]
    seconds = {name: median(one[name] for one in rounds) for name in calls}
    speedups = sorted(one["transformers"] / one["longrnn"] for one in rounds)
    figures = {f"tokens_per_second_{n}": args.tokens / value for n, value in seconds.items()}
    figures["speedup"] = seconds["transformers"] / seconds["longrnn"]
    figures["speedup_least"], figures["speedup_most"] = speedups[0], speedups[-1]
    figures["over_chunked"] = median(one[CHUNKED] / one["longrnn"] for one in rounds)
    figures["carry_cost"] = seconds[CARRIED] / seconds["longrnn"] - 1
    figures["matrix_products"] = products(calls["longrnn"])
    print(f"vocabulary {vocab:,}")
    for name, value in seconds.items():
        print(f"  {name:18} {args.tokens / value:8.1f} tokens/s   {value:6.2f} s per step")
    print(
        f"  speedup {figures['speedup']:.2f} ({speedups[0]:.2f} to {speedups[-1]:.2f}), "
        f"{figures['over_chunked']:.2f} over the backend chunked, cost of "
        f"carrying {figures['carry_cost']:+.1%}, {figures['matrix_products']:.0%} of the time in "
        "matrix products"
    )
    for how in ("block", "segment"):
        figures[f"time_{how}"] = seconds[f"longrnn, {how}"] / seconds["longrnn"]
        print(f"  checkpointing per {how}: {figures[f'time_{how}']:.2f} of the time")
    return figures


def products(call: Callable[[], object]) -> float:
    """Returns the share of a call that is spent in matrix products."""
    with torch.profiler.profile() as profile:
        call()
    events = profile.key_averages()
    inside = sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS)
    return inside / sum(event.self_cpu_time_total for event in events)


def activation_memory(args: argparse.Namespace, vocab: int) -> dict[str, float]:
    """Returns MiB per token, by precision and checkpointing: kept by the forward pass, and peak.

    They are differences of two lengths, so that weights and the head are left out.
    """
    figures, lengths = {}, (args.tokens, 2 * args.tokens)
    print("MiB per token: kept by the forward pass, peak of forward and backward pass")
    for precision in ("float32", "bfloat16"):
        for how in GRANULARITIES:
            found = []
            for length in lengths:
                model = build(args, vocab, how)
                batch = draw(argparse.Namespace(**{**vars(args), "tokens": length}), vocab)
                objective, state, live = Objective(model), model.init_state(1), LiveBytes()
                live.known(*model.parameters())
                with live:
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                        output = objective([batch], state)
                    kept = live.now
                    output.loss.backward()
                found.append((kept, live.peak))
                del output
            kept, peak = (
                (two - one) / args.tokens / 2**20 for one, two in zip(*found, strict=True)
            )
            figures[f"{precision}_{how}_kept"], figures[f"{precision}_{how}_peak"] = kept, peak
            print(f"  {precision:9} {how:8} {kept:.3f} {peak:.3f}")
    return figures


class Watched(Trainer):
    """A trainer that records time and memory per step, and late in its run times a new trainer.

    If the machine becomes slower over time, both trainers are affected; if steps become slower in
    the course of a run, only this trainer is.
    """

    def __init__(self, folder: str, steps: int) -> None:
        super().__init__(build_config(TrainConfig, run_of(f"{folder}/old", steps)), quiet=True)
        self.young = Trainer(
            build_config(TrainConfig, run_of(f"{folder}/young", steps)), quiet=True
        )
        self.fifth = steps // 5
        # For each step: seconds and resident memory in MiB.
        self.own: list[tuple[float, float]] = []
        self.others: list[float] = []

    def _train_step(self, *, stop: bool) -> dict[str, float]:
        begun = clock()
        values = super()._train_step(stop=stop)
        self.own.append((clock() - begun, mebibytes()[0]))
        # The new trainer has as many warm-up steps as are excluded at the start of this run.
        if self.step >= self.config.max_steps - self.fifth - self.fifth // 2:
            begun = clock()
            self.young._train_step(stop=False)
            self.young.step += 1
            self.others.append(clock() - begun)
        return values


def run_of(folder: str, steps: int) -> dict[str, Any]:
    """Returns the configuration of a run of a small model with carried states."""
    return {
        "output_dir": folder,
        "task": {"kind": "passkey", "max_segments": 64},
        "model": {
            "vocab_size": 256,
            "d_model": 64,
            "n_layers": 2,
            "mixer": {"kind": "mamba2", "d_state": 16, "head_dim": 32},
        },
        "length": {"max": 192},
        "initial_state": {"kind": "carry"},
        "per_device_train_batch_size": 4,
        "max_steps": steps,
        "warmup_steps": min(100, steps),
        "save_steps": steps,
    }


def flatness(args: argparse.Namespace) -> dict[str, float]:
    """Returns time per step and resident memory of the trainer early and late in a run."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Watched(folder, args.steps)
        trainer.train()
    fifth = trainer.fifth
    # The first tenth is excluded because allocators and kernels are warming up.
    early, late = trainer.own[fifth // 2 : fifth // 2 + fifth], trainer.own[-fifth:]
    figures = {}
    for name, part in (("early", early), ("late", late)):
        figures[f"ms_per_step_{name}"] = 1e3 * median(seconds for seconds, _ in part)
        figures[f"resident_mib_{name}"] = median(resident for _, resident in part)
    figures["ms_per_step_young"] = 1e3 * median(trainer.others[-fifth:])
    figures["time_growth"] = figures["ms_per_step_late"] / figures["ms_per_step_young"] - 1
    figures["memory_growth"] = figures["resident_mib_late"] / figures["resident_mib_early"] - 1
    print(
        f"{args.steps} steps of the trainer: {figures['ms_per_step_early']:.2f} ms per step in the "
        f"first fifth after warming up,\n  {figures['ms_per_step_late']:.2f} in the last, "
        f"interleaved with steps of a new trainer: {figures['ms_per_step_young']:.2f} "
        f"({figures['time_growth']:+.1%});\n  {figures['resident_mib_early']:.1f} and "
        f"{figures['resident_mib_late']:.1f} MiB resident ({figures['memory_growth']:+.1%})"
    )
    return figures


def main() -> None:
    args = arguments()
    use_threads(args)
    figures: dict[str, Any] = {"shape": [args.layers, args.d_model], "tokens": args.tokens}
    if args.steps:
        figures["flatness"] = flatness(args)
    if args.memory:
        figures["memory"] = activation_memory(args, args.vocab[0])
    for vocab in [] if args.memory else args.vocab:
        figures[f"vocabulary_{vocab}"] = throughput(args, vocab)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
