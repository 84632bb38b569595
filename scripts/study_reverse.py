"""Test whether positional encodings help recurrent models with large vocabularies.

    python scripts/study_reverse.py vocabularies
    python scripts/study_reverse.py vocabularies --cell lstm
    python scripts/study_reverse.py rare

Reverse ordering (`configs/train/reverse_study.yaml`), as in arXiv 2402.00236. The control is
`duplicate`, a second copy of the token embedding: as wide as an encoding, but without positions.
Encodings are compared seed by seed.

`vocabularies`: cells × encodings × vocabularies × seeds at the same training tokens. Every finished
run is one line of `--rows`, by default docs/reverse.jsonl of the repository; a run that is there is
not trained again, on any machine. The most telling runs are first, and what is there is reported.
`rare`: half of the vocabulary is rare in training; accuracy and the stability of the gradient of
the LSTM, at each checkpoint.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from studies import compared, estimate, options, record, run, table, tally, train
from torch import Tensor

from longrnn import TASKS, LMState, load
from longrnn.errors import require
from longrnn.files import write_atomic
from longrnn.reporting import figures
from longrnn.state import leaves, tree_map
from longrnn.training.run import read_runs
from longrnn.units import parse_lengths

CELLS: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in ("lstm", "gru", "rnn")}
CELLS["mamba2"] = {"kind": "mamba2", "d_state": 32, "head_dim": 32}
ENCODINGS = ["none", "duplicate", "sinusoidal", "learned", "random"]
CONTROL = "duplicate"
# The most telling first; the largest only for the LSTM, without and with sinusoidal positions.
SIZES, LARGEST = [1024, 256, 64, 4096], 16_384
# The learning rate of a cell with an encoding has the lowest loss at TUNED tokens, with a seed of
# its own; `rare` has one for all.
TUNED, TUNING_SEED, RATE = 256, 999, 0.01
TESTED, LEARNED = 1024, 0.95
DEFAULT_ROWS = Path(__file__).parent.parent / "docs/reverse.jsonl"
# What identifies a run, and its keys in the configuration; the other values of a row are measured.
SETTINGS = {
    "cell": "model.mixer",
    "encoding": "model.position.kind",
    "vocab_size": "task.vocab_size",
    "length": "length.max",
    "width": "model.d_model",
    "batch": "per_device_train_batch_size",
    "steps": "max_steps",
    "rate": "learning_rate",
    "seed": "seed",
}
SCORES = ("token_accuracy", "exact_match", "distance", "steps_to_95")
Key = tuple[Any, ...]
Row = dict[str, Any]
Known = dict[Key, Row]


def main() -> None:
    parser = options(__doc__, "runs/reverse-study")
    parser.add_argument("part", choices=("vocabularies", "rare"))
    parser.add_argument("--cell", nargs="+", choices=CELLS, help="(default: all; rare: lstm)")
    parser.add_argument("--encoding", nargs="+", choices=ENCODINGS, default=ENCODINGS)
    parser.add_argument("--vocab-sizes", type=parse_lengths, help="(default: all; rare: 256)")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128, help="rows per step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.01, 0.02])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=Path, default=DEFAULT_ROWS, help="file of finished runs")
    parser.add_argument("--triplets", type=int, default=1024, help="of the gradient stability")
    args = parser.parse_args()
    args.output /= args.part
    blocks = {"vocabularies": vocabularies, "rare": rare}[args.part](args)
    record(args.output, f"Reverse ordering: {args.part}", *blocks)


def trained(args: Namespace, key: Key, more: dict[str, Any]) -> Path:
    """Trains one model with further settings, and returns the folder of its run."""
    settings = dict(zip(SETTINGS.values(), key, strict=True)) | {"model.mixer": CELLS[key[0]]}
    settings |= {"validation.vocab_size": settings["task.vocab_size"], "eval_length": args.length}
    return train("reverse_study", args.output / "-".join(map(str, key)), settings | more)


def vocabularies(args: Namespace) -> list[str]:
    """Trains what the rows lack, and compares encodings by cell and vocabulary."""
    args.cell = args.cell or [*CELLS]
    lines = args.rows.read_text().splitlines() if args.rows.exists() else []
    known: Known = {tuple(row[name] for name in SETTINGS): row for row in map(json.loads, lines)}
    for key in plan(args, known):
        if key not in known:
            require("rapidfuzz", "the distance between sequences")
            known[key] = measured(args, key)
            with args.rows.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
    return report(args, known)


def key_of(args: Namespace, cell: str, encoding: str, vocab: int, rate: float, seed: int) -> Key:
    return (cell, encoding, vocab, args.length, args.width, args.batch, args.steps, rate, seed)


def plan(args: Namespace, known: Known) -> Iterator[Key]:
    """Yields the runs, the most telling first; whoever reads it trains one before the next."""
    stages = [("lstm", ENCODINGS[:3], SIZES), ("lstm", ENCODINGS[3:], SIZES)]
    stages += [(cell, ENCODINGS, SIZES) for cell in ("gru", "rnn", "mamba2")]
    for cell, encodings, sizes in [*stages, ("lstm", ["none", "sinusoidal"], [LARGEST])]:
        names = [name for name in encodings if name in args.encoding and cell in args.cell]
        if len(args.rates) > 1:
            for name in names:
                for rate in args.rates:
                    yield key_of(args, cell, name, TUNED, rate, TUNING_SEED)
        # Encodings are innermost, so that an interrupted study has whole comparisons.
        for size, seed, name in product(args.vocab_sizes or sizes, range(args.seeds), names):
            rate = rate_of(args, known, cell, name)
            yield key_of(args, cell, name, size, rate, 111 * (seed + 1))


def rate_of(args: Namespace, known: Known, cell: str, encoding: str) -> float:
    """Returns the learning rate with the lowest loss of those that have been tried."""

    def loss(rate: float) -> float:
        key = key_of(args, cell, encoding, TUNED, rate, TUNING_SEED)
        return known[key]["loss"] if key in known else inf

    return min(args.rates, key=loss)


def measured(args: Namespace, key: Key) -> Row:
    """Trains one model and returns its row: settings and scores on held-out sequences."""
    from rapidfuzz.distance import DamerauLevenshtein  # pyright: ignore[reportMissingImports]

    started, row = time.process_time(), dict(zip(SETTINGS, key, strict=True))
    (found,) = read_runs([trained(args, key, {})])
    model, task = found.model(), TASKS.build({"kind": "reverse", "vocab_size": row["vocab_size"]})
    batch = task.held_out(TESTED, length=args.length)
    with torch.inference_mode():
        answers = model(batch.tokens, keep=args.length).logits.argmax(-1)
    pairs = zip(answers.tolist(), batch.targets[:, -args.length :].tolist(), strict=True)
    learned = [at["step"] for at in found.rows if at.get("eval_token_accuracy", 0) >= LEARNED]
    return row | {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        **{name: found.last(f"eval_{name}") for name in ("token_accuracy", "exact_match", "loss")},
        "distance": fmean(DamerauLevenshtein.normalized_distance(*pair) for pair in pairs),
        "steps_to_95": min(learned, default=None),
        "core_seconds": round(time.process_time() - started),
    }


def report(args: Namespace, known: Known) -> list[str]:
    """Compares all rows, and draws the accuracy by vocabulary, a picture per cell beside them."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in args.cell:
        drawn = {}
        for encoding in args.encoding:
            rate, curve = rate_of(args, known, cell, encoding), {}
            sizes = sorted(args.vocab_sizes or [*SIZES, LARGEST])
            for size, seed in product(sizes, range(args.seeds)):
                key = key_of(args, cell, encoding, size, rate, 111 * (seed + 1))
                if key in known:
                    curve.setdefault(size, []).append(known[key])
            values = quantities(curve)
            for quantity in values:
                found.setdefault(f"{cell}, {quantity}", {})[encoding] = values[quantity]
            if curve:
                shares = {size: values[f"token_accuracy, V = {size:,}"] for size in curve}
                drawn[encoding] = {size: estimate(each) for size, each in shares.items()}
        if drawn:
            picture = figures.lines(drawn, across="vocabulary", up=f"token accuracy, {cell}")
            file = args.rows.with_name(f"{args.rows.stem}_{cell}.png")
            write_atomic(file, figures.png(picture))
    about = (
        f"{TESTED:,} held-out sequences. distance: Damerau-Levenshtein, normalised. steps_to_95: "
        "until 95 % of the tokens are right, where all seeds get there. growth: doublings of these "
        "steps per doubling of V. limit: log2 of the V at which the accuracy falls below 95 %, if "
        "that of all seeds does."
    )
    return [about, *comparison(found, "token_accuracy")]


def comparison(found: Mapping[str, Mapping[str, list[float]]], judged: str) -> list[str]:
    """Returns a table of quantities by encoding, and the verdict on those named `judged`."""
    head = ["of", "encoding", "mean [95 % interval over seeds]"]
    head += [f"minus {CONTROL}", "verdict", "minus none", "verdict"]
    rows = [
        [quantity, *row]
        for quantity, values in found.items()
        for row in compared(values, CONTROL, "none")
    ]
    verdicts = [row[4] for row in rows if judged in row[0] and row[1] != "none"]
    said = f"**Verdict.** {judged} with positions, beside the {CONTROL} control: {tally(verdicts)}."
    return [table(head, rows), f"{said} One in twenty intervals is expected to be wrong."]


def quantities(curve: Mapping[int, list[Row]]) -> dict[str, list[float]]:
    """Returns what is reported of one encoding, a value per seed, from its runs by vocabulary."""
    found: dict[str, list[float]] = {}
    for size, rows in curve.items():
        for name in SCORES:
            values = [row[name] for row in rows]
            if None not in values:
                found[f"{name}, V = {size:,}"] = values
    most = max(map(len, curve.values()), default=0)
    whole = {size: rows for size, rows in curve.items() if len(rows) == most}
    steps = {size: found.get(f"steps_to_95, V = {size:,}") for size in whole}
    learned = {size: np.log2(values) for size, values in steps.items() if values is not None}
    if len(learned) > 1:
        slopes = np.polyfit(np.log2([*learned]), [*learned.values()], 1)[0]
        found["growth"] = slopes.tolist()
    wrong = [[1 - row["token_accuracy"] for row in rows] for rows in whole.values()]
    wrong = np.maximum.accumulate(wrong or [[0.0]])
    if (wrong[0] <= 1 - LEARNED).all() and (wrong[-1] > 1 - LEARNED).all():
        places = np.log2([*whole])
        found["limit"] = [float(np.interp(1 - LEARNED, seed, places)) for seed in wrong.T]
    return found


def rare(args: Namespace) -> list[str]:
    """Compares accuracy and the stability of the gradient, by condition and checkpoint."""
    found: dict[str, dict[str, list[float]]] = {}
    kind, saved = "reverse_dual_frequency", {"save_steps": max(1, args.steps // 4)}
    for cell, vocab in product(args.cell or ["lstm"], args.vocab_sizes or [256]):
        task: Any = TASKS.build({"kind": kind, "vocab_size": vocab})
        test, draw = task.held_out(TESTED, length=args.length), torch.Generator().manual_seed(0)
        inputs = {
            name: triplets(task, ids, args.triplets, args.length, draw)
            for name, ids in task.conditions().items()
        }
        for encoding, seed in product(args.encoding, range(args.seeds)):
            key = key_of(args, cell, encoding, vocab, RATE, 111 * (seed + 1))
            folder = trained(args, key, {"task.kind": kind, **saved})
            for place in sorted(folder.glob("checkpoint-*")):
                model = load(place)
                with torch.inference_mode():
                    right = (model(test.tokens).logits.argmax(-1) == test.targets)[test.answer]
                for index, (condition, tokens) in enumerate(inputs.items()):
                    values = {
                        "accuracy": float(right[index::4].double().mean()),
                        "stability": float(stability(model, tokens).mean()),
                    }
                    for score, value in values.items():
                        name = f"{cell}, V = {vocab:,}, {place.name}, {condition}, {score}"
                        found.setdefault(name, {}).setdefault(encoding, []).append(value)
    about = (
        "Accuracy: of the targets of held-out sequences. Stability: cosine of the gradient "
        "between inputs with one first token (docs/studies.md)."
    )
    return [about, *comparison(dict(sorted(found.items())), "stability")]


def triplets(task: Any, ids: Any, n: int, length: int, draw: torch.Generator) -> Tensor:
    """Returns pairs of inputs with the same first token, `(n, 2, 2 · length)`."""
    (low, high), (start, stop) = ((part.start, part.stop) for part in ids)
    first = torch.randint(low, high, (n, 1, 1), generator=draw).expand(n, 2, 1)
    others = torch.randint(start, stop, (n, 2, length - 1), generator=draw)
    inputs = torch.cat([first, others], dim=2)
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
            rows = torch.cat([grad.flatten(1) for grad in grads], 1).view(len(part), 2, -1)
            first, second = rows.unbind(1)
            products = products + (first * second).sum(1)
            weights = weights + first.norm(dim=1) * second.norm(dim=1)
        found.append(torch.where(weights > 0, products / weights, 0.0))
    return torch.cat(found)


if __name__ == "__main__":
    run(main)
