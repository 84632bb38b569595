"""Compare policies for the initial state of a row, at equal budget, by the loss on books.

    python scripts/study_initial_states.py --train data/war_and_peace.txt data/don_quixote.txt \\
        --text data/moby_dick.txt data/tom_sawyer.txt
    python scripts/study_initial_states.py --base collapse-tiny --train-length 64 --length 64k \\
        --train data/war_and_peace.txt --text data/moby_dick.txt

The base is trained on books from zero states (`configs/train/books_256.yaml`, or `--base`). Then
training continues with each policy and seed on the same books with the same steps and tokens, and
with `--row-lengths` also from zero states on longer rows; the others are compared with `zero`.
Models are evaluated on held-out books. Intervals are over the seeds of the continued training; the
base has one seed, so they hold for this base only. Finished runs are skipped.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import studies

from longrnn import load
from longrnn.errors import UserError
from longrnn.units import format_length, parse_length, parse_lengths

POLICIES = ("zero", "carry", "pass", "fitted_noise", "random_noise")
# Windows of the training length that are read of each text.
INSIDE = 64


def main() -> None:
    parser = studies.options(__doc__, "runs/initial-states")
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="books to train on")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out books")
    parser.add_argument("--base", help="checkpoint to continue from (default: trained here)")
    parser.add_argument("--base-steps", type=int, default=1200)
    parser.add_argument("--train-length", type=parse_length, default=256)
    parser.add_argument("--steps", type=int, default=300, help="of each policy")
    parser.add_argument("--step-tokens", type=parse_length, default=4096)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--row-lengths", type=parse_lengths, default=[])
    parser.add_argument("--length", type=parse_length, help="(default: 64 training lengths)")
    parser.add_argument("--windows", type=int, default=4, help="of that length, of each book")
    args = parser.parse_args()
    trained, reach = args.train_length, args.length or 64 * args.train_length
    rows = {**dict.fromkeys(args.policy, trained)}
    rows |= {f"zero-{format_length(length)}": length for length in args.row_lengths}
    if "zero" not in args.policy or reach < 2 * trained:
        raise UserError(
            "the others are compared with zero, beyond the training length: name zero in --policy, "
            "and give a longer --length"
        )
    if any(args.step_tokens % length for length in rows.values()):
        raise UserError(
            f"{args.step_tokens} tokens of a step are not a whole number of rows: give "
            "--step-tokens and lengths that divide"
        )
    task = studies.text_task(args.train)
    start = {
        "task": task,
        "max_steps": args.base_steps,
        "warmup_steps": min(100, args.base_steps // 2),
        "length.max": trained,
    }
    base = args.base or str(studies.train("books_256", args.output / "base", start))
    short = min(INSIDE, reach * args.windows // trained)
    inside = studies.windows(args.text, base, trained, short)
    beyond = studies.windows(args.text, base, reach, args.windows)
    edges = [trained * 4**k for k in range(20) if trained * 4**k < reach] + [reach]
    spans = list(pairwise(edges))

    def measured(checkpoint: str) -> list[float]:
        """Returns the loss in short windows, by span of long ones, and largest beyond / inside."""
        model = load(checkpoint)
        by_position = studies.losses(model, beyond).mean(0)
        by_span = [float(by_position[a:b].mean()) for a, b in spans]
        loss_inside = float(studies.losses(model, inside).mean())
        return [loss_inside, *by_span, studies.growth(by_position, trained)]

    found = {"base": [measured(base)]}
    for seed in range(args.seeds):  # outermost, so that an interrupted study has whole comparisons
        for name, length in rows.items():
            config: dict[str, Any] = {"init_from": base, "task": task}
            settings = {
                "initial_state": {"kind": name.partition("-")[0]},
                "seed": seed,
                "length.max": length,
                "per_device_train_batch_size": args.step_tokens // length,
                "max_steps": args.steps,
                "learning_rate": 5e-4,
                "warmup_steps": args.steps // 15,
                "weight_decay": 0.1,
            }
            folder = studies.train(config, args.output / f"{name}-seed{seed}", settings)
            found.setdefault(name, []).append(measured(str(folder)))
    values = {name: list(zip(*runs, strict=True)) for name, runs in found.items()}
    lines = [[name, len(found[name]), *map(studies.estimate, values[name])] for name in found]
    verdicts = []
    for name in (each for each in found if each not in ("base", "zero")):
        less = [*map(studies.differences, values[name], values["zero"])]
        lines.append([f"{name} − zero", len(found[name]), *less])
        verdicts.append(f"{name} {studies.verdict(less[-2])}")
    columns = [f"{format_length(start)} to {format_length(stop)}" for start, stop in spans]
    columns = [f"windows of {format_length(trained)}", *columns, "largest beyond / inside"]
    studies.record(
        args.output,
        f"Initial states of training rows, {format_length(trained)} tokens each",
        studies.table(["start", "seeds", *columns], lines),
        "**Verdict.** Loss in the last span, compared with zero states: "
        f"{'; '.join(verdicts) or 'nothing to compare'}.",
    )


if __name__ == "__main__":
    studies.run(main)
