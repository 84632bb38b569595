"""Relate the size of the state to forgetting (`forget`) and to recall (`recall`).

    python scripts/study_capacity.py forget --text data/moby_dick.txt data/tom_sawyer.txt
    python scripts/study_capacity.py recall

`forget` trains byte-level language models with slow decays (`configs/train/capacity_forget.yaml`),
which collapse beyond their training length unless that length teaches them to forget. T_forget is
the shortest training length from which on the loss by position on long windows stays below 2 × its
largest value inside (arXiv 2410.07145), found by bisection. `recall` trains on passkeys
(`configs/train/capacity.yaml`): each state size learns the task at the shortest length, and every
longer length continues from there. T_recall is the longest prompt with more than 95 % recalled.
All models have equal steps and tokens per step. Finished runs are skipped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import studies
from scipy import stats
from scipy.optimize import curve_fit

from longrnn import TASKS, load
from longrnn.errors import UserError
from longrnn.units import parse_lengths

# Tokens per optimizer step, a multiple of all training lengths.
STEP_TOKENS = {"forget": 1536, "recall": 6144}
D_STATES = {"forget": "2,6,16,48,128", "recall": "4,12,32,96,256"}
LENGTHS = {"forget": "64,96,128,192,256,384,512,768", "recall": "192,384,768,1536"}
# Layers × heads × channels per head of the configurations: entries per unit of d_state.
ENTRIES = 256
FACTOR, RECALLED = 2.0, 0.95


def main() -> None:
    parser = studies.options(__doc__, "runs/capacity")
    parser.add_argument("part", choices=STEP_TOKENS)
    parser.add_argument("--d-states", type=parse_lengths, help="state sizes, comma-separated")
    parser.add_argument("--train-lengths", type=parse_lengths)
    parser.add_argument("--steps", type=int, help="of every run (default: 250; recall: 1,000)")
    parser.add_argument("--more-steps", type=int, default=300, help="of recall, after the start")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--train", type=Path, nargs="+", help="books to train on")
    parser.add_argument("--text", type=Path, nargs="+", help="books that training does not see")
    parser.add_argument("--length", type=int, default=2**14, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prompts", type=parse_lengths, default=[2**k for k in range(8, 16)])
    parser.add_argument("--n", type=int, default=60, help="prompts of each length")
    args = parser.parse_args()
    args.output /= args.part
    d_states = args.d_states or parse_lengths(D_STATES[args.part])
    lengths = sorted(args.train_lengths or parse_lengths(LENGTHS[args.part]))
    for length in lengths:
        if STEP_TOKENS[args.part] % length:
            raise UserError(
                f"rows of {length} tokens do not divide a step of {STEP_TOKENS[args.part]:,} "
                "tokens, and all lengths must have equal tokens: give divisors of it"
            )
    (forget if args.part == "forget" else recall)(args, d_states, lengths)


def settings(part: str, d_state: int, length: int, seed: int, steps: int) -> dict[str, object]:
    return {
        "model.mixer.d_state": d_state,
        "length.max": length,
        "per_device_train_batch_size": STEP_TOKENS[part] // length,
        "seed": seed,
        "max_steps": steps,
        "warmup_steps": max(1, steps // 8),
        "save_steps": steps,
    }


def forget(args, d_states: Sequence[int], lengths: Sequence[int]) -> None:
    if not args.text or args.length <= lengths[-1]:
        raise UserError("give --text with books, and a --length beyond the training lengths")
    ratios: dict[tuple[int, int, int], float] = {}

    def robust(length: int, d_state: int, seed: int) -> bool:
        """Trains one model and returns whether it forgets robustly."""
        chosen = settings("forget", d_state, length, seed, args.steps or 250)
        if args.train:
            chosen["task"] = studies.text_task(args.train)
        name = f"state{d_state}-length{length}-seed{seed}"
        folder = studies.train("capacity_forget", args.output / name, chosen)
        rows = studies.windows(args.text, str(folder), args.length, args.windows)
        curve = studies.losses(load(folder), rows).mean(0)
        ratios[d_state, length, seed] = studies.growth(curve, length)
        return ratios[d_state, length, seed] <= FACTOR

    rows = []
    for seed in range(args.seeds):
        for d_state in d_states:
            place = bisect_left(lengths, True, key=lambda t, d=d_state, s=seed: robust(t, d, s))
            found = f"{lengths[place]:,}" if place < len(lengths) else f"> {lengths[-1]:,}"
            rows.append([f"{d_state * ENTRIES:,}", seed, f"≤ {found}" if place == 0 else found])
    models = [
        [f"{d * ENTRIES:,}", t, s, f"{ratio:.2f}", "yes" if ratio <= FACTOR else "no"]
        for (d, t, s), ratio in sorted(ratios.items())
    ]
    head = ["state", "trained on", "seed", "largest loss beyond / inside", "forgets robustly"]
    studies.record(
        args.output,
        "Forgetting by the size of the state",
        studies.table(["state", "seed", "T_forget"], rows),
        studies.table(head, models),
        f"**Verdict.** {slopes(ratios)}",
    )


def slopes(ratios: dict[tuple[int, int, int], float]) -> str:
    """Fits log2 of the ratio by doublings of state and training length, with t intervals."""
    x = np.log2([[d * ENTRIES, length] for d, length, _ in ratios]).T
    free = x.shape[1] - 3
    if free < 1 or any(len(set(row)) < 2 for row in x.tolist()):
        return "No fit: it needs four models of different state sizes and training lengths."
    y = np.log2(list(ratios.values()))
    best, covariance = curve_fit(lambda x, a, b, c: a + b * x[0] + c * x[1], x, y)
    half = stats.t.ppf(0.975, free) * np.sqrt(np.diag(covariance))
    state, length = (
        f"{m:.3f} [{m - h:.3f}, {m + h:.3f}]" for m, h in zip(best[1:], half[1:], strict=True)
    )
    return (
        f"log2 of the largest loss beyond / inside changes by {state} per doubling of the state, "
        f"and by {length} per doubling of the training length ({len(y)} models)."
    )


def recall(args, d_states: Sequence[int], lengths: Sequence[int]) -> None:
    task, rows, longest = TASKS.build({"kind": "passkey"}), [], {}
    prompts = {t: task.sample(args.n, length=t, seed=t) for t in args.prompts}
    for seed in range(args.seeds):
        for d_state in d_states:
            start = args.output / f"start{d_state}-seed{seed}"
            first = settings("recall", d_state, lengths[0], seed, args.steps or 1000)
            studies.train("capacity", start, first)
            for length in lengths:
                name = f"state{d_state}-length{length}-seed{seed}"
                more = settings("recall", d_state, length, seed, args.more_steps)
                del more["model.mixer.d_state"]
                more |= {"init_from": str(start), "learning_rate": 4e-3}
                base = {"task": {"kind": "passkey"}}
                folder = studies.train(base, args.output / name, more)
                model, reached, cells = load(folder), 0, []
                for asked, batch in prompts.items():
                    share = studies.recalled(model, batch, 8)
                    cells.append(f"{share:.2f}")
                    reached = asked if share > RECALLED else reached
                longest.setdefault(d_state, []).append(reached)
                rows.append([f"{d_state * ENTRIES:,}", length, seed, *cells])
    best = {d: max(found) for d, found in longest.items()}
    studies.record(
        args.output,
        "Recall by the size of the state",
        studies.table(["state", "trained on", "seed", *(f"{t:,}" for t in args.prompts)], rows),
        "**Verdict.** Longest prompt with more than 95 % of the keys recalled, of the best model: "
        f"{'; '.join(f'{d * ENTRIES:,} entries {n:,}' for d, n in best.items())}.",
    )


if __name__ == "__main__":
    studies.run(main)
