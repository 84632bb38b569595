"""Compare the mitigations of state collapse by the loss on held-out books.

    python scripts/study_state_collapse.py collapse-tiny --train-length 64 \\
        --calibration data/don_quixote.txt --choice data/karamazov_brothers.txt \\
        --text data/moby_dick.txt data/tom_sawyer.txt --length 64k

Every mitigation is measured at several settings, which are multiples of the training length. The
setting of each is chosen on a text that is used for nothing else; calibrated ones see a third text.
A long stream is one window: `--length 1M --windows 1`. Passkeys under mitigations are compared by
`longrnn eval passkey CKPT 'CKPT+state_norm(threshold=1)' …`. Finished measurements are kept.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import studies

from longrnn import evaluate
from longrnn.errors import UserError
from longrnn.units import format_length, parse_length

# Windows of the training length that are read of each text, at most.
INSIDE = 64


def settings(trained: int) -> dict[str, str | None]:
    """Returns what is tried: mitigations with their options, or methods of `longrnn calibrate`."""
    return {
        "none": None,
        **{
            f"state_norm {margin}x": f"calibrate state_norm(windows=16, margin={margin})"
            for margin in (0.7, 1, 1.5)
        },
        **{
            f"forget_more {k}x": f"forget_more(decay_scale={1 - 1 / (k * trained)})" for k in (1, 4)
        },
        "forget_more published": "forget_more(decay_scale=0.9999,input_scale=0.75)",
        **{f"sliding_window {k}x": f"sliding_window(window={k * trained})" for k in (1, 4, 16)},
        "token_filter half": "calibrate token_filter(quantile=0.5)",
        "token_filter nine-tenths": "calibrate token_filter(quantile=0.9)",
        **{
            f"{kind} search": f"calibrate {kind}(windows=1, steps=20)"
            for kind in ("scale_delta", "scale_decay", "power_decay")
        },
        "scale_delta 4": "scale_delta(scale=0.25)",
        "scale_decay 4": "scale_decay(scale=4)",
        "scale_decay 16": "scale_decay(scale=16)",
        "power_decay half": "power_decay(scale=0.5)",
    }


def main() -> None:
    parser = studies.options(__doc__, "runs/state-collapse")
    parser.add_argument("checkpoint")
    parser.add_argument("--train-length", type=parse_length, required=True)
    parser.add_argument("--calibration", type=Path, nargs="+", required=True)
    parser.add_argument("--choice", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=parse_length, default=2**16)
    parser.add_argument("--windows", type=int, default=4, help="of that length, of each text")
    parser.add_argument("--target", default="8k", help="length to calibrate for")
    parser.add_argument("--method", nargs="+", help="mitigations to try (default: all)")
    args = parser.parse_args()
    trained, length, output = args.train_length, args.length, args.output
    if length < 2 * trained:
        raise UserError(f"states collapse beyond {trained:,} tokens: give a longer --length")
    studies.text_task([*args.calibration, *args.choice, *args.text])  # which must exist
    tried = {
        label: mitigated(args, label, spec)
        for label, spec in settings(trained).items()
        if not args.method or label.split()[0] in ("none", *args.method)
    }
    on_choice = losses(output / "choice", tried, texts=args.choice, lengths=[length], windows=1)
    best = {"none": "none"}  # label of each mitigation
    for label in sorted(tried, key=lambda label: on_choice[label][0].estimate.mean):
        best.setdefault(label.split()[0], label)
    chosen = {label: tried[label] for label in best.values()}
    edges = [trained * 2**k for k in range(40) if trained * 2**k < length] + [length]
    short = {"lengths": [trained], "windows": min(INSIDE, length * args.windows // trained)}
    inside = losses(output / "inside", chosen, texts=args.text, **short)
    long = {"lengths": edges, "windows": args.windows}
    beyond = losses(output / "beyond", chosen, texts=args.text, **long)
    rows, verdicts = [], {}
    for label in chosen:
        cells = [*inside[label], *beyond[label][1:]]
        less = cells[-1].difference
        rows.append([label, *(cell.estimate for cell in cells), less or ""])
        verdicts[label] = studies.verdict(less) if less else "none"
    lower = [label for label, verdict in verdicts.items() if verdict == "lower"]
    others = [label for label in chosen if label not in ("none", *lower)]
    spans = [f"{format_length(start)} to {format_length(stop)}" for start, stop in pairwise(edges)]
    head = ["mitigation", f"windows of {format_length(trained)}", *spans, "last minus none"]
    studies.record(
        output,
        f"Mitigations of state collapse: {args.checkpoint}, trained on {format_length(trained)}",
        studies.table(head, rows),
        "Bits per byte with 95 % intervals over windows; differences are paired.",
        "**Verdict.** In the last span the loss is lower than without with: "
        f"{', '.join(lower) or 'none of them'}; inconclusive or higher: "
        f"{', '.join(others) or 'none of them'}.",
    )


def mitigated(args: Namespace, label: str, spec: str | None) -> str:
    """Returns the name of the checkpoint under a mitigation, which is calibrated if need be."""
    if spec is None:
        return args.checkpoint
    if spec.startswith("calibrate "):
        file = args.output / f"{label.replace(' ', '-')}.yaml"
        if not file.exists():
            texts = [word for text in args.calibration for word in ("--text", str(text))]
            target = [] if label.startswith("state_norm") else ["--target-length", args.target]
            how = ["--method", spec.removeprefix("calibrate "), "--output", str(file), *target]
            trained = ["--train-length", str(args.train_length)]
            studies.command("--quiet", "calibrate", args.checkpoint, *texts, *how, *trained)
        spec = str(file)
    return f"{args.checkpoint}+{spec}"


def losses(folder: Path, models: Mapping[str, str], **options: Any) -> dict[str, list[Any]]:
    """Measures models, by label; returns the cells of their loss up to each length."""
    names = [*models.values()]
    cells = evaluate(names, {"kind": "perplexity", **options}, folder, quiet=False)
    spans = [cell for cell in cells if cell.metric == "perplexity, bits per byte"]
    return {label: [cell for cell in spans if cell.model == models[label]] for label in models}


if __name__ == "__main__":
    studies.run(main)
