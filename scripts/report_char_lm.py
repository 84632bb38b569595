"""The report of scripts/study_char_lm.py: table, verdict, gradients, samples."""

from __future__ import annotations

import math
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.timing import cpu_model
from longrnn import LanguageModel, generate
from longrnn.diagnostics.gradients import LENGTHS, GradientRecord
from longrnn.diagnostics.gradients_report import layers
from longrnn.intervals import Estimate, mean
from longrnn.text import ByteTokenizer
from scripts.char_mlp import CONTEXT

# Characters per training step, and characters of a text window in the evaluation.
STEP_TOKENS, WINDOW_TOKENS = 2048, 1024
# Kind of the baseline of scripts/char_mlp.py.
MLP = "mlp"
# Nats per character: a smaller gain does not count as help.
MARGIN = 0.02
PROMPT = "ROMEO:\n"


class Setting(NamedTuple):
    """One row of the table: a cell, and the characters that a gradient passes through.

    For `mlp`, the characters that the model sees.
    """

    kind: str
    window: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.window}"


SETTINGS = [
    *(Setting("rnn", window) for window in LENGTHS),
    *(Setting(kind, LENGTHS[-1]) for kind in ("gru", "lstm", "mamba2")),
    Setting(MLP, CONTEXT),
]


class Study(NamedTuple):
    """The results of the study.

    Attributes:
        losses: nats per character for each setting, one value per seed.
        widths: d_model, or units of the hidden layer of `mlp`, for each kind of cell.
        sizes: number of parameters for each kind of cell.
        models: model of the first seed for each setting.
        head: file with the training text.
        tail: file with the held-out text.
        steps: training steps of each run.
    """

    losses: dict[str, list[float]]
    widths: dict[str, int]
    sizes: dict[str, int]
    models: dict[str, LanguageModel]
    head: Path
    tail: Path
    steps: int


def verdict(losses: dict[str, list[float]]) -> list[str]:
    """Returns the verdict on longer windows, and a comparison of each other cell with the RNN.

    What was not trained is not compared.
    """
    names = [Setting("rnn", window).name for window in (LENGTHS[0], LENGTHS[-1])]
    lines = []
    if all(name in losses for name in names):
        lines.append(_windows(*(losses[name] for name in names)))
    for setting in SETTINGS[len(LENGTHS) :]:
        if setting.name not in losses or names[-1] not in losses:
            continue
        gain = difference(losses[names[-1]], losses[setting.name])
        than = "better" if gain.low > 0 else "worse" if gain.high < 0 else "inconclusive"
        lines.append(f"- {setting.name} compared with {names[-1]}: {nats(gain)} nats less, {than}.")
    return lines


def _windows(short: list[float], long: list[float]) -> str:
    """Returns the verdict on windows of the shortest and of the longest length."""
    helped = difference(short, long)
    if len(short) == 1:
        judged = "**Not judged**: one seed gives no interval."
    elif helped.high < MARGIN:
        judged = "**Confirmed**"
    elif helped.low > MARGIN:
        judged = "**Refuted**"
    else:
        judged = "**Inconclusive**"
    return (
        f"Longer windows do not help the vanilla RNN: {judged.rstrip('.')}. From windows of "
        f"{LENGTHS[0]} to {LENGTHS[-1]} its loss falls by {nats(helped)} nats per character "
        f"(paired by seed). Confirmed means that the interval lies below {MARGIN} (a perplexity "
        f"lower by {1 - math.exp(-MARGIN):.0%}), refuted that it lies above."
    )


def difference(one: list[float], other: list[float]) -> Estimate:
    return mean([a - b for a, b in zip(one, other, strict=True)])


def nats(estimate: Estimate) -> str:
    if estimate.n == 1:
        return f"{estimate.mean:.4f}"
    return f"{estimate.mean:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def report_lines(study: Study, record: GradientRecord) -> list[str]:
    """Returns the report in Markdown."""
    losses, seeds = study.losses, len(next(iter(study.losses.values())))
    chosen = [setting for setting in SETTINGS if setting.name in losses]
    trained, measured = (path.stat().st_size for path in (study.head, study.tail))
    command = shlex.join(["python", "-m", "scripts.study_char_lm", *sys.argv[1:]])
    lines = [
        "# Character language model: does a longer window help?",
        "",
        f"{datetime.now(UTC).date()}, {cpu_model()}, torch {torch.__version__}, float32, "
        f"{torch.get_num_threads()} thread(s). Trained on {trained:,} bytes, evaluated on the "
        f"{measured:,} that follow, in windows of {WINDOW_TOKENS:,}. {study.steps:,} steps of "
        f"{STEP_TOKENS:,} characters, AdamW, gradient norm clipped at 1; recurrent models carry "
        f"their state, {MLP} sees the last {CONTEXT} characters.",
        "",
        f"```\n{command}\n```",
        "",
        f"| | window | width | parameters | perplexity, {seeds} seed(s) [95 % t interval] |",
        "| --- | --- | --- | --- | --- |",
    ]
    for setting in chosen:
        width, size = study.widths[setting.kind], study.sizes[setting.kind]
        perplexity = mean([math.exp(loss) for loss in losses[setting.name]])
        lines.append(
            f"| {setting.kind} | {setting.window} | {width} | {size:,} | "
            f"{perplexity if seeds > 1 else f'{perplexity.mean:.2f}'} |"
        )
    lines += ["", *verdict(losses), "", "## Gradients", "", *gradient_table(record)]
    lines += ["", "## Samples", "", f"Temperature 0.8 after {PROMPT!r}, seed 0.", ""]
    for setting in chosen:
        lines += [
            f"{setting.name}:",
            "",
            "```",
            sample(study.models[setting.name]),
            "```",
            "",
        ]
    return lines[:-1]


def gradient_table(record: GradientRecord) -> list[str]:
    """Returns factor per token, half-life, and gradient of the recurrent weights by length."""
    lengths = [str(length) for length in record.about["lengths"]]
    lines = [
        "Models of the first seed on the held-out text, in float64. Factor and half-life are those "
        f"of ∂loss_T/∂h_k over the more distant half of {lengths[-1]} characters; the median entry "
        "is that of the gradient of the last loss with respect to the recurrent weights.",
        "",
        "| | factor per token | halved every | largest Lyapunov exponent | median entry at "
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


def sample(model: LanguageModel) -> str:
    """Returns a text that the model generates."""
    tokenizer = ByteTokenizer()
    generation = generate(
        model,
        torch.tensor([tokenizer.encode(PROMPT)]),
        max_new_tokens=240,
        temperature=0.8,
        generator=torch.Generator().manual_seed(0),
    )
    return tokenizer.decode(generation.tokens[0]).replace("```", "'''").strip()
