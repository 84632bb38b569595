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

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import studies

from longrnn import load, mitigation
from longrnn.errors import UserError
from longrnn.units import format_length, parse_length

# Windows of the training length that are read of each text, at most.
INSIDE = 64


def settings(trained: int) -> Mapping[str, Mapping[str, str | None]]:
    """Returns what to try of each mitigation: a specification, or a method to calibrate with."""
    search = "calibrate {}(windows=1, steps=20)"
    slow = {f"{k}x": f"forget_more(decay_scale={1 - 1 / (k * trained)})" for k in (1, 4)}
    return {
        "none": {"": None},
        "state_norm": {
            f"{m}x": f"calibrate state_norm(windows=16, margin={m})" for m in ("0.7", "1", "1.5")
        },
        "forget_more": slow | {"published": "forget_more(decay_scale=0.9999,input_scale=0.75)"},
        "sliding_window": {
            f"{k}x": f"sliding_window(window={k * trained})" for k in (1, 4, 16)
        },
        "token_filter": {
            name: f"calibrate token_filter(quantile={share})"
            for name, share in (("half", 0.5), ("nine-tenths", 0.9))
        },
        "scale_delta": {"search": search.format("scale_delta"), "4": "scale_delta(scale=0.25)"},
        "scale_decay": {"search": search.format("scale_decay")}
        | {k: f"scale_decay(scale={k})" for k in ("4", "16")},
        "power_decay": {
            "search": search.format("power_decay"), "half": "power_decay(scale=0.5)",
        },
    }  # fmt: skip


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
    trained, length = args.train_length, args.length
    if length < 2 * trained:
        raise UserError(f"states collapse beyond {trained:,} tokens: give a longer --length")
    name = args.checkpoint
    plain = load(name)
    tried = {m: s for m, s in settings(trained).items() if m in ("none", *(args.method or [m]))}
    short = min(INSIDE, length * args.windows // trained)
    texts = {
        "choice": studies.windows(args.choice, name, length, 1),
        "inside": studies.windows(args.text, name, trained, short),
        "beyond": studies.windows(args.text, name, length, args.windows),
    }
    edges = [trained * 2**k for k in range(40) if trained * 2**k < length] + [length]
    spans = list(pairwise(edges))

    def measured(method: str, setting: str, part: str) -> list[list[float]]:
        """Returns the losses of each window: of the whole one inside, by span otherwise."""
        spec = tried[method][setting]
        label = f"{method}-{setting}" if setting else method
        kept = args.output / part / f"{label}-{format_length(length)}.json"
        if kept.exists():
            return json.loads(kept.read_text())
        if spec is not None and spec.startswith("calibrate "):
            file = args.output / f"{label}.yaml"
            if not file.exists():
                target = [] if method == "state_norm" else ["--target-length", args.target]
                given = [value for text in args.calibration for value in ("--text", str(text))]
                lengths = ["--train-length", str(trained), *target]
                how = ["--method", spec.removeprefix("calibrate "), "--output", str(file)]
                studies.command("--quiet", "calibrate", name, *given, *lengths, *how)
            spec = str(file)
        model = plain if spec is None else plain.under(mitigation(spec))
        found = studies.losses(model, texts[part])
        parts = [(0, trained)] if part == "inside" else spans
        rows = [[float(row[a:b].mean()) for a, b in parts] for row in found]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(rows))
        return rows

    def chosen(method: str) -> str:
        sums = {s: sum(map(sum, measured(method, s, "choice"))) for s in tried[method]}
        return min(sums, key=sums.__getitem__)

    head = [f"{format_length(a)} to {format_length(b)}" for a, b in spans]
    rows, verdicts = [], {}
    none = [row[-1] for row in measured("none", "", "beyond")]
    for method in tried:
        setting = chosen(method)
        inside = [row[0] for row in measured(method, setting, "inside")]
        beyond = measured(method, setting, "beyond")
        less = studies.differences([row[-1] for row in beyond], none)
        cells = [studies.estimate(column) for column in zip(*beyond, strict=True)]
        rows.append([f"{method} {setting}".strip(), studies.estimate(inside), *cells, less])
        verdicts[method] = studies.verdict(less)
    lower = [method for method, verdict in verdicts.items() if verdict == "lower"]
    title = f"Mitigations of state collapse: {name}, trained on {format_length(trained)}"
    studies.record(
        args.output,
        title,
        studies.table(
            ["mitigation", f"windows of {format_length(trained)}", *head, "last minus none"], rows
        ),
        "Loss in nats per token with 95 % intervals over windows; differences are paired.",
        f"**Verdict.** In the last span the loss is lower than without with: "
        f"{', '.join(lower) or 'none of them'}; inconclusive or higher: "
        f"{', '.join(m for m in verdicts if m not in ('none', *lower)) or 'none of them'}.",
    )


if __name__ == "__main__":
    studies.run(main)
