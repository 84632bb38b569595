"""Test whether positional encodings help recurrent models with large vocabularies.

    python scripts/study_reverse.py encodings
    python scripts/study_reverse.py rare
    python scripts/study_reverse.py vocabularies --vocab-sizes 256,1024,4096 --steps 300

Reverse ordering (`configs/train/reverse_study.yaml`), as in arXiv 2402.00236. The control is
`duplicate`, a second copy of the token embedding: as wide as an encoding, but without positions.
Encodings are compared with it seed by seed.

`encodings`: accuracy on unseen sequences, by cell and encoding. `rare`: half of the vocabulary is
rare in training; accuracy and the stability of the gradient of the LSTM, at each checkpoint.
`vocabularies`: the slope of the loss over log2 of the vocabulary. Finished runs are skipped.
"""

from __future__ import annotations

import math
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies import compared, options, record, right, run, table, train
from torch import Tensor

from longrnn import TASKS, LMState, load
from longrnn.errors import UserError
from longrnn.state import leaves, tree_map
from longrnn.units import parse_lengths

CELLS: dict[str, dict[str, Any]] = {
    "lstm": {"kind": "lstm"},
    "gru": {"kind": "gru"},
    "rnn": {"kind": "rnn"},
    "mamba2": {"kind": "mamba2", "d_state": 32, "head_dim": 32},
}
ENCODINGS = ["none", "duplicate", "sinusoidal", "learned", "random"]
CONTROL = "duplicate"
TESTED = 1024


def main() -> None:
    parser = options(__doc__, "runs/reverse-study")
    parser.add_argument("part", choices=("encodings", "rare", "vocabularies"))
    parser.add_argument("--cell", nargs="+", choices=CELLS, help="(default: all; rare: lstm)")
    parser.add_argument("--encoding", nargs="+", choices=ENCODINGS, default=ENCODINGS)
    parser.add_argument("--vocab-sizes", type=parse_lengths, help="(default: 256)")
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=64, help="per step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--triplets", type=int, default=1024, help="of the gradient stability")
    args = parser.parse_args()
    if CONTROL not in args.encoding:
        raise UserError(f"encodings are compared with {CONTROL}: name it in --encoding, too")
    args.output /= args.part
    blocks = {"encodings": encodings, "rare": rare, "vocabularies": vocabularies}[args.part](args)
    record(args.output, f"Reverse ordering: {args.part}", *blocks)


def trained(
    args: Namespace, cell: str, encoding: str, vocab: int, seed: int, kind: str = "reverse"
) -> Path:
    """Trains one model, with four checkpoints, and returns the folder of its run."""
    settings = {
        "task": {"kind": kind, "vocab_size": vocab},
        "model.vocab_size": vocab + 1,
        "model.d_model": args.width,
        "model.mixer": CELLS[cell],
        "model.position": {"kind": encoding, "combine": "concat"},
        "length.max": args.length,
        "max_steps": args.steps,
        "warmup_steps": max(1, args.steps // 20),
        "per_device_train_batch_size": args.rows,
        "save_steps": max(1, args.steps // 4),
        "seed": 111 * (seed + 1),
    }
    if encoding == "none":
        settings["model.position"] = {"kind": "none"}
    return train("reverse_study", args.output / f"{cell}-{encoding}-{vocab}-seed{seed}", settings)


def verdict_of(rows: list[list[object]]) -> str:
    """Counts the verdicts in the last column, of encodings with positions."""
    verdicts = [row[-1] for row in rows if row[1] not in (CONTROL, "none")]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("higher", "lower", "inconclusive"))
    return (
        f"**Verdict.** Of {len(verdicts)} comparisons of a positional encoding with the {CONTROL} "
        f"control: {counts}. One in twenty intervals is expected to be wrong."
    )


HEAD = ["of", "encoding", "mean [95 % interval over seeds]", f"minus {CONTROL}", "verdict"]


def encodings(args: Namespace) -> list[str]:
    """Compares the accuracy on unseen sequences, by cell and vocabulary."""
    rows = []
    for cell, vocab in product(args.cell or CELLS, args.vocab_sizes or [256]):
        task = TASKS.build({"kind": "reverse", "vocab_size": vocab})
        batch = task.sample(TESTED, length=args.length)
        found = {}
        for encoding in args.encoding:
            runs = [trained(args, cell, encoding, vocab, seed) for seed in range(args.seeds)]
            shares = [right(load(run), batch.tokens, batch.targets).double() for run in runs]
            found[encoding] = [float(share.mean()) for share in shares]
        rows += [[f"{cell}, V = {vocab:,}", *row] for row in compared(found, CONTROL)]
    return ["Token accuracy on unseen sequences.", table(HEAD, rows), verdict_of(rows)]


def rare(args: Namespace) -> list[str]:
    """Compares the stability of the gradient, by condition and checkpoint."""
    rows = []
    for cell, vocab in product(args.cell or ["lstm"], args.vocab_sizes or [256]):
        kind = "reverse_dual_frequency"
        task: Any = TASKS.build({"kind": kind, "vocab_size": vocab})
        draw = torch.Generator().manual_seed(0)
        inputs = {
            name: triplets(task, ids, args.triplets, args.length, draw)
            for name, ids in task.conditions().items()
        }
        found: dict[tuple[str, str], dict[str, list[float]]] = {}
        for encoding, seed in product(args.encoding, range(args.seeds)):
            folder = trained(args, cell, encoding, vocab, seed, kind)
            for place in sorted(folder.glob("checkpoint-*")):
                model = load(place)
                for condition, tokens in inputs.items():
                    key = (place.name, condition)
                    value = float(stability(model, tokens).mean())
                    found.setdefault(key, {}).setdefault(encoding, []).append(value)
        for (step, condition), values in sorted(found.items()):
            rows += [[f"{cell}, {step}, {condition}", *row] for row in compared(values, CONTROL)]
    about = (
        "Stability of the gradient J of the last output in the state after the first token: the "
        "cosine of J between two inputs with the same first token, weighted by norms; 1 if the "
        "other tokens do not change it."
    )
    return [about, table(HEAD, rows), verdict_of(rows)]


def triplets(task: Any, ids: Any, n: int, length: int, draw: torch.Generator) -> Tensor:
    """Returns pairs of inputs with the same first token, `(n, 2, 2 · length)`."""
    (low, high), (start, stop) = ((part.start, part.stop) for part in ids)
    first = torch.randint(low, high, (n, 1, 1), generator=draw).expand(n, 2, 1)
    rest = torch.randint(start, stop, (n, 2, length - 1), generator=draw)
    inputs = torch.cat([first, rest], dim=2)
    return torch.cat([inputs, torch.full_like(inputs, task.query)], dim=2)


def stability(model: Any, inputs: Tensor) -> Tensor:
    """Returns Σ_i ⟨J_i, J'_i⟩ / Σ_i ‖J_i‖ ‖J'_i‖ over the rows i of J, for each pair, `(n,)`."""
    model.requires_grad_(False)
    found = []
    for part in inputs.split(64):
        tokens = part.flatten(0, 1)
        state = model(tokens[:, :1], keep=0).state
        layers = tree_map(lambda leaf: leaf.clone().requires_grad_(), state.layers)
        z = [leaf for _, leaf in leaves(layers)]
        y, _ = model.hidden(tokens[:, 1:], LMState(state.position, layers), keep=1)
        products = weights = torch.zeros(len(part))
        for index in range(y.shape[-1]):
            total = y[:, 0, index].sum()
            grads = torch.autograd.grad(total, z, retain_graph=True, materialize_grads=True)
            first, second = (
                torch.cat([g.flatten(1) for g in grads], 1).view(len(part), 2, -1).unbind(1)
            )
            products = products + (first * second).sum(1)
            weights = weights + first.norm(dim=1) * second.norm(dim=1)
        found.append(torch.where(weights > 0, products / weights, 0.0))
    return torch.cat(found)


def vocabularies(args: Namespace) -> list[str]:
    """Compares how the loss grows with the vocabulary."""
    sizes, rows = args.vocab_sizes or [256, 1024, 4096, 16_384], []
    if len(sizes) < 2:
        raise UserError("a slope needs two vocabularies: give --vocab-sizes such as 256,1024")
    for cell in args.cell or ["mamba2"]:
        found: dict[str, list[float]] = {}
        for encoding, seed in product(args.encoding, range(args.seeds)):
            curve = [loss(args, cell, encoding, vocab, seed) for vocab in sizes]
            slope = np.polyfit([math.log2(vocab) for vocab in sizes], curve, 1)[0]
            found.setdefault(encoding, []).append(float(slope))
        rows += [[cell, *row] for row in compared(found, CONTROL)]
    about = f"Slope of the loss in nats per doubling of the vocabulary, V in {sizes}."
    return [about, table(HEAD, rows), verdict_of(rows)]


def loss(args: Namespace, cell: str, encoding: str, vocab: int, seed: int) -> float:
    """Trains one model and returns its loss on unseen sequences, in nats per scored token."""
    model = load(trained(args, cell, encoding, vocab, seed))
    task = TASKS.build({"kind": "reverse", "vocab_size": vocab})
    batch = task.sample(TESTED, length=args.length)
    losses, _ = model.token_losses(batch.tokens, batch.targets)
    return float(losses.double().sum() / (batch.targets >= 0).sum())


if __name__ == "__main__":
    run(main)
