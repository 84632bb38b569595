"""The report of scripts/study_char_lm.py: table, verdict, gradients, samples."""

from __future__ import annotations

import math
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.timing import cpu_model
from longrnn import generate, load, load_tokenizer
from longrnn.diagnostics.gradients import LENGTHS, GradientRecord
from longrnn.diagnostics.gradients_report import layers
from longrnn.intervals import Estimate, mean

# Characters of one step, and of a stretch that is measured.
STEP_TOKENS, STRETCH = 2048, 1024
# Nats a character: what counts as help.
MARGIN = 0.02
PROMPT = "ROMEO:\n"


class Setting(NamedTuple):
    """One row of the table: a cell, and the characters that a gradient goes back through."""

    kind: str
    window: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.window}"


SETTINGS = [
    *(Setting("rnn", window) for window in LENGTHS),
    *(Setting(kind, LENGTHS[-1]) for kind in ("gru", "lstm", "mamba2")),
]


class Study(NamedTuple):
    """What was trained and measured.

    Attributes:
        losses: nats a character by setting, one a seed.
        models: configurations by kind of cell.
        sizes: their parameters.
        output: the folder of runs.
        head: the text that was trained on.
        tail: the text that was measured on.
        steps: of every run.
    """

    losses: dict[str, list[float]]
    models: dict[str, dict[str, Any]]
    sizes: dict[str, int]
    output: Path
    head: Path
    tail: Path
    steps: int


def verdict(losses: dict[str, list[float]]) -> list[str]:
    """The published observation judged, and each other cell beside the RNN of the same window."""
    short, long = (losses[Setting("rnn", window).name] for window in (LENGTHS[0], LENGTHS[-1]))
    helped = difference(short, long)
    if len(short) == 1:
        judged = "**Not judged**: one seed has no interval."
    elif helped.high < MARGIN:
        judged = "**Confirmed**"
    elif helped.low > MARGIN:
        judged = "**Refuted**"
    else:
        judged = "**Inconclusive**"
    lines = [
        f"Longer windows do not help the vanilla RNN: {judged.rstrip('.')}. From windows of "
        f"{LENGTHS[0]} to {LENGTHS[-1]} its loss falls by {nats(helped)} nats a character (paired "
        f"by seed). Confirmed means that the interval lies below {MARGIN} (a perplexity lower by "
        f"{1 - math.exp(-MARGIN):.0%}), refuted that it lies above."
    ]
    for setting in SETTINGS[len(LENGTHS) :]:
        gain = difference(long, losses[setting.name])
        than = "better" if gain.low > 0 else "worse" if gain.high < 0 else "not told apart"
        lines.append(f"- {setting.name} beside rnn-{LENGTHS[-1]}: {nats(gain)} nats less, {than}.")
    return lines


def difference(one: list[float], other: list[float]) -> Estimate:
    return mean([a - b for a, b in zip(one, other, strict=True)])


def nats(estimate: Estimate) -> str:
    if estimate.n == 1:
        return f"{estimate.mean:.4f}"
    return f"{estimate.mean:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def written(study: Study, record: GradientRecord) -> list[str]:
    """The report in Markdown."""
    losses, seeds = study.losses, len(study.losses[SETTINGS[0].name])
    trained, measured = (path.stat().st_size for path in (study.head, study.tail))
    command = shlex.join(["python", "-m", "scripts.study_char_lm", *sys.argv[1:]])
    lines = [
        "# Character language model: does a longer window help?",
        "",
        f"{datetime.now(UTC).date()}, {cpu_model()}, torch {torch.__version__}, float32, "
        f"{torch.get_num_threads()} thread(s). Trained on {trained:,} bytes, measured on the "
        f"{measured:,} that follow, in stretches of {STRETCH:,}. {study.steps:,} steps of "
        f"{STEP_TOKENS:,} characters, AdamW, gradient norm clipped at 1, state carried.",
        "",
        f"```\n{command}\n```",
        "",
        f"| | window | d_model | parameters | perplexity, {seeds} seed(s) [95 % t interval] |",
        "| --- | --- | --- | --- | --- |",
    ]
    for setting in SETTINGS:
        d_model, size = study.models[setting.kind]["d_model"], study.sizes[setting.kind]
        perplexity = mean([math.exp(loss) for loss in losses[setting.name]])
        lines.append(
            f"| {setting.kind} | {setting.window} | {d_model} | {size:,} | "
            f"{perplexity if seeds > 1 else f'{perplexity.mean:.2f}'} |"
        )
    lines += ["", *verdict(losses), "", "## Gradients", "", *gradient_table(record)]
    lines += ["", "## Samples", "", f"Temperature 0.8 after {PROMPT!r}, seed 0.", ""]
    for setting in SETTINGS:
        lines += [
            f"{setting.name}:",
            "",
            "```",
            sample(study.output / setting.name / "seed0"),
            "```",
            "",
        ]
    return lines[:-1]


def gradient_table(record: GradientRecord) -> list[str]:
    """Factor a token and half-life, and the gradient of the recurrent weights by length."""
    lengths = [str(length) for length in record.about["lengths"]]
    lines = [
        "On the tail, models of the first seed, in float64. Factor and half-life are those of "
        f"∂loss_T/∂h_k over the far half of {lengths[-1]} characters; the median entry is that of "
        "the gradient of the recurrent weights, of the loss at the last character.",
        "",
        "| | factor a token | halved every | largest Lyapunov exponent | median entry at "
        + " | ".join(lengths)
        + " |",
        "| --- " * (4 + len(lengths)) + "|",
    ]
    for row in layers(record):
        weights = record.of("weights", subject=row["subject"])
        cells = [f"{row['factor']:.3f}" if row["factor"] is not None else "0"]
        cells.append(f"{row['half_life']:.1f}" if row["half_life"] is not None else "–")
        cells.append(f"{row['exponent']:.3f}")
        cells += [f"{weight['median']:.1e}" for weight in weights]
        lines.append(f"| {row['subject']} | {' | '.join(cells)} |")
    return lines


def sample(run: Path) -> str:
    """What a model writes."""
    model, tokenizer = load(run), load_tokenizer(run)
    said = generate(
        model,
        torch.tensor([tokenizer.encode(PROMPT)]),
        max_new_tokens=240,
        temperature=0.8,
        generator=torch.Generator().manual_seed(0),
    )
    return tokenizer.decode(said.tokens[0]).replace("```", "'''").strip()
