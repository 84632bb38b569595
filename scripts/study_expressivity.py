"""Relate cells to the state that they can track, and to the pairs that they can recall.

    python scripts/study_expressivity.py tracking
    python scripts/study_expressivity.py recall
    python scripts/study_expressivity.py gradients --task parity --cell mamba3

Small models (`configs/train/expressivity.yaml`) of every cell learn each task on short sequences,
continue on longer ones, and are tested on sequences that training never drew. The first seed
chooses the learning rate by the token accuracy at the training length; the other seeds use it.

`tracking`: parity, sums modulo 5 and products of permutations, tested beyond the training length.
A length is solved if more than 95 % of the tokens are right. CLAIMS has the cells that papers say
solve a task at any length. Such a cell confirms it if all seeds solve the longest sequences; it is
not seen at this size if all seeds solve the training length and none the longest. Any other cell
confirms its inability if no seed solves the longest sequences although another cell does; this is
not seen if all seeds do. The rest is inconclusive.
`recall`: multi-query recall and phone books by the size of the state, if the cell has a matrix as
its state. Finished runs are skipped.
`gradients`: models of `tracking` continue on longer documents, read in segments, with gradients
through one segment or through the whole document: as many tokens and steps, from the same start.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import studies
import torch
from torch import Tensor

from longrnn import TASKS, load
from longrnn.data.batch import Batch, Task, row_starts
from longrnn.errors import UserError
from longrnn.state import nbytes
from longrnn.units import parse_lengths

NONLINEAR = ("rnn", "gru", "lstm")
DELTA = {"n_heads": 2, "key_dim": 16, "value_dim": 32}
CELLS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in NONLINEAR},
    "mamba": {"kind": "mamba"},
    "mamba2": {"kind": "mamba2", "d_state": 32, "head_dim": 32},
    "mamba3": {"kind": "mamba3", "d_state": 32, "head_dim": 32},
    "gated_deltanet": {"kind": "gated_deltanet", **DELTA},
    "gated_deltanet (β to 2)": {"kind": "gated_deltanet", **DELTA, "negative_eigenvalues": True},
    "kda": {"kind": "kda", **DELTA},
}
TASKS_OF: dict[str, dict[str, dict[str, Any]]] = {
    "tracking": {
        "parity": {"kind": "parity"},
        "modular_sum": {"kind": "modular_sum", "vocab_size": 5},
        "S3": {"kind": "permutations", "vocab_size": 6},
        "A5": {"kind": "permutations", "vocab_size": 60},
    },
    "recall": {
        "mqar": {"kind": "mqar", "vocab_size": 32, "n_pairs": 4},
        "phonebook": {"kind": "phonebook", "vocab_size": 32},
    },
}
# arXiv 2404.08819 (recurrent networks and diagonal cells), 2411.12537 (negative eigenvalues) and
# 2603.15569 (Mamba-3).
CLAIMS = {
    "parity": {*NONLINEAR, "mamba3", "gated_deltanet (β to 2)"},
    "modular_sum": {*NONLINEAR, "mamba3", "gated_deltanet (β to 2)"},
    "S3": {*NONLINEAR, "gated_deltanet (β to 2)"},
    "A5": {*NONLINEAR},
}
LENGTHS = {"tracking": (8, 40, [256]), "recall": (24, 48, []), "gradients": (8, 40, [256, 1024])}
TESTED, SOLVED = 512, 0.95
# Tokens of a segment, segments of a document, and sequences to test, of `gradients`.
SEGMENT, SEGMENTS, LONG_TESTED = 32, 8, 128
NOT_SEEN = "not seen at this size"


@TASKS.register("documents")
class Documents(Task):
    """Documents of another task, one after another, of which a batch has one segment of each row.

    Args:
        tokenizer: ignored.
        of: the other task.
        segments: of a document.
        staggered: whether equally many rows begin a document in every batch, by shorter first ones.
    """

    carries = True

    def __init__(
        self, tokenizer: object = None, *, of: dict[str, Any], segments: int, staggered: bool
    ) -> None:
        self.task, self.segments = TASKS.build(of), segments
        self.shares = segments if staggered else 1
        self.vocab_size = self.task.vocab_size

    def batch(self, index: int, rows: range, *, length: int, **how: Any) -> Batch:
        how |= {"length": length * self.segments, "carried": False}
        parts = [self._segment(index, share, rows, length, how) for share in range(self.shares)]
        tokens, targets, starts = (torch.cat(each) for each in zip(*parts, strict=True))
        return Batch(tokens, targets, starts)

    def _segment(
        self, index: int, share: int, rows: range, length: int, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, targets and starts of each row whose number has a remainder."""
        document, place = divmod(index + share, self.segments)
        place -= 0 if document else share
        whole = self.task.batch(document, rows, **how)
        tokens, targets = (
            each[share :: self.shares, place * length : (place + 1) * length]
            for each in (whole.tokens, whole.targets)
        )
        return tokens, targets, row_starts(tokens, place == 0)


class Outcome(NamedTuple):
    """What the seeds of one cell reach: token accuracies by length, at the best learning rate."""

    rate: float
    trained: list[float]
    tested: list[float]
    state: int


def main() -> None:
    parser = studies.options(__doc__, "runs/expressivity")
    parser.add_argument("part", choices=LENGTHS)
    parser.add_argument("--cell", nargs="+", choices=CELLS, default=[*CELLS])
    parser.add_argument("--task", nargs="+", help="(default: all of the part)")
    parser.add_argument("--sizes", type=parse_lengths, default=[4, 16, 64], help="of recall")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start-steps", type=int, default=2000, help="on short sequences")
    parser.add_argument("--steps", type=int, default=1000, help="on long sequences")
    parser.add_argument("--document-steps", type=int, default=200, help="of gradients")
    parser.add_argument("--document-rate", type=float, help="of gradients (default: as before)")
    parser.add_argument("--rows", type=int, default=32, help="per step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, help="tested (default: 256; recall: as in training)")
    args = parser.parse_args()
    known = TASKS_OF["recall" if args.part == "recall" else "tracking"]
    if unknown := set(args.task or []) - known.keys():
        raise UserError(f"{args.part} has no task {min(unknown)!r}: use {', '.join(known)}")
    args.tasks = {name: known[name] for name in args.task or known}
    args.output /= args.part
    {"tracking": tracking, "recall": recall, "gradients": gradients}[args.part](args)


def outcome(args: Namespace, name: str, task: dict[str, Any], mixer: dict[str, Any]) -> Outcome:
    """Trains the seeds of one cell on a task, and tests them."""
    length, further = LENGTHS[args.part][1:]
    lengths = [length, *([args.length] if args.length else further)]

    def reached(rate: float, seed: int) -> list[float]:
        return accuracies(learned(args, name, task, mixer, rate, seed), task, lengths)

    of_rates = {rate: reached(rate, 0) for rate in args.rates}
    best = max(args.rates, key=lambda rate: of_rates[rate][0])
    values = [of_rates[best], *(reached(best, seed) for seed in range(1, args.seeds))]
    model = load(args.output / f"{name}-{args.layers}-rate{best:g}-seed0" / "long")
    state = nbytes(model.init_state(1).layers) // 4
    return Outcome(best, [v[0] for v in values], [v[-1] for v in values], state)


def learned(
    args: Namespace, name: str, task: dict[str, Any], mixer: dict[str, Any], rate: float, seed: int
) -> Path:
    """Trains a cell on short sequences, then on longer ones, and returns the folder."""
    start, length, _ = LENGTHS[args.part]
    folder = args.output / f"{name}-{args.layers}-rate{rate:g}-seed{seed}"
    common = {"task": task, "learning_rate": rate, "seed": seed}
    common["per_device_train_batch_size"] = args.rows
    first, last = (
        {**common, "length.max": of, "max_steps": steps, "save_steps": steps}
        for of, steps in ((start, args.start_steps), (length, args.steps))
    )
    # There are few short sequences: 256 of parity.
    first |= {"task": {**task, "held_out": 64}}
    first |= {"model.mixer": mixer, "model.n_layers": args.layers}
    base = studies.train("expressivity", folder / "short", first)
    return studies.train({}, folder / "long", last | {"init_from": str(base)})


def accuracies(
    folder: Path, task: dict[str, Any], lengths: list[int], count: int = TESTED
) -> list[float]:
    """Tests a run by the share of right tokens of some sequences, at lengths."""
    model = load(folder)
    held_out = [TASKS.build(task).held_out(count, length=length) for length in lengths]
    shares = [studies.right(model, batch.tokens, batch.targets) for batch in held_out]
    return [float(share.double().mean()) for share in shares]


def gradients(args: Namespace) -> None:
    rows, verdicts = [], []
    lengths = LENGTHS["gradients"][2]
    ways = {"one segment": (SEGMENTS, 1), "the document": (1, SEGMENTS)}
    for (name, task), cell, rate in product(args.tasks.items(), args.cell, args.rates):
        found: dict[str, list[list[float]]] = {"start": [], **{way: [] for way in ways}}
        for seed in range(args.seeds):
            start = learned(args, f"{name}-{cell}", task, CELLS[cell], rate, seed)
            found["start"].append(accuracies(start, task, lengths, LONG_TESTED))
            further = {
                "task": {"kind": "documents", "of": task, "segments": SEGMENTS},
                "init_from": str(start),
                "initial_state.kind": "carry",
                "seed": seed,
                "learning_rate": args.document_rate or rate,
                "max_steps": args.document_steps,
                "length.max": SEGMENT,
                "save_steps": args.document_steps,
            }
            for way, (more_rows, segments) in ways.items():
                further["per_device_train_batch_size"] = args.rows * more_rows
                further["segments_per_step"] = segments
                further["task.staggered"] = segments == 1
                folder = start.parent / f"{way}-rate{further['learning_rate']:g}".replace(" ", "-")
                run = studies.train({}, folder, further)
                found[way].append(accuracies(run, task, lengths, LONG_TESTED))
        for at, length in enumerate(lengths):
            shares = {way: [values[at] for values in seeds] for way, seeds in found.items()}
            gain = studies.differences(shares["the document"], shares["one segment"])
            verdicts.append(studies.verdict(gain))
            means = map(studies.estimate, shares.values())
            rows.append([name, cell, f"{rate:g}", length, *means, gain, verdicts[-1]])
    head = ["task", "cell", "rate", "tokens", "start", *ways, "difference", "verdict"]
    said = f"**Verdict.** The document, beside one segment: {studies.tally(verdicts)}."
    studies.record(args.output, "Gradients through documents", studies.table(head, rows), said)


def tracking(args: Namespace) -> None:
    rows, verdicts = [], []
    for name, task in args.tasks.items():
        found = {cell: outcome(args, f"{name}-{cell}", task, CELLS[cell]) for cell in args.cell}
        is_learned = any(min(of.tested) > SOLVED for of in found.values())
        for cell, of in found.items():
            claimed = cell in CLAIMS[name]
            judged = verdict(of, claimed, is_learned)
            verdicts.append(judged)
            said = "solves it" if claimed else "does not"
            means = map(studies.estimate, (of.trained, of.tested))
            rows.append([name, cell, f"{of.rate:g}", *means, said, judged])
    last = args.length or LENGTHS["tracking"][2][0]
    studies.record(
        args.output,
        "State tracking",
        studies.table(["task", "cell", "rate", "at 40", f"at {last}", "papers", "verdict"], rows),
        f"**Verdict.** {studies.tally(verdicts)}. Token accuracies are means over seeds.",
    )


def verdict(of: Outcome, claimed: bool, is_learned: bool) -> str:
    """Returns what the seeds of a cell say about the claim that it solves a task, or does not."""
    solved = [value > SOLVED for value in of.tested]
    if claimed:
        fails = not any(solved) and min(of.trained) > SOLVED
        return "confirmed" if all(solved) else NOT_SEEN if fails else "inconclusive"
    lacks = not any(solved) and is_learned
    return NOT_SEEN if all(solved) else "confirmed" if lacks else "inconclusive"


def recall(args: Namespace) -> None:
    rows, verdicts = [], []
    matrix = [cell for cell in args.cell if cell not in NONLINEAR]
    for (name, task), cell in product(args.tasks.items(), matrix):
        option = "key_dim" if "key_dim" in CELLS[cell] else "d_state"
        found = {
            size: outcome(args, f"{name}-{cell}-{size}", task, {**CELLS[cell], option: size})
            for size in args.sizes
        }
        reached = {str(size): of.trained for size, of in found.items()}
        compared = studies.compared(reached, str(args.sizes[0]))
        verdicts += [row[-1] for row in compared[1:]]
        for of, (_, *columns) in zip(found.values(), compared, strict=True):
            rows.append([name, cell, f"{of.state:,}", f"{of.rate:g}", *columns])
    head = ["task", "cell", "numbers of state", "rate", "accuracy", "minus smallest", "verdict"]
    said = f"**Verdict.** Of the larger states, beside the smallest: {studies.tally(verdicts)}."
    studies.record(args.output, "Recall by load", studies.table(head, rows), said)


if __name__ == "__main__":
    studies.run(main)
