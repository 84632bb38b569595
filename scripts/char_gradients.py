"""The gradient of the recurrent weights along the training of scripts/study_char_lm.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from longrnn.sweep.table import table

from longrnn.data import TASKS, Task
from longrnn.diagnostics.gradients import LENGTHS
from longrnn.diagnostics.plots import new_figure, png
from longrnn.diagnostics.through_time import BINS, Run, histogram, last_scored
from longrnn.files import write_atomic
from longrnn.hf.loading import load_recurrent
from longrnn.intervals import mean
from longrnn.seeds import seeded
from longrnn.training import checkpoint
from scripts.report_char_lm import MLP, Setting

# Sequences of the held-out text.
ROWS = 16
# Entries below this size, relative to the largest one, change the weight by next to nothing.
SMALL = 1e-3


def along_training(
    chosen: Sequence[Setting], output: Path, tail: Path, seeds: int, picture: Path
) -> list[str]:
    """Returns a table of the gradient in the middle and at the end of every seed's training.

    Measured is the gradient of the loss at the last character of the held-out text with respect to
    the recurrent weights of the recurrent setting with the longest window, as
    `longrnn diagnose gradients` does. Writes a picture with the histograms.
    """
    recurrent = [one for one in chosen if one.kind != MLP]
    setting = next((one for one in reversed(recurrent) if one.kind == "rnn"), recurrent[0])
    task = TASKS.build({"kind": "text", "files": [str(tail)]})
    found: list[dict[str, Any]] = []
    for seed in range(seeds):
        folders = checkpoint.checkpoints(output / setting.name / f"seed{seed}")
        for folder, time in ((folders[0], "middle"), (folders[-1], "end")):
            for length in LENGTHS:
                about = {"seed": seed, "time": time, "step": checkpoint.steps(folder)}
                found.append({**about, "length": length, **_measure(folder, task, length)})
    write_atomic(picture, _picture(found, setting.name))
    cells = []
    for time in ("middle", "end"):
        for length in LENGTHS:
            rows = [one for one in found if (one["time"], one["length"]) == (time, length)]
            medians = ", ".join(f"{one['median']:.1e}" for one in rows)
            norms = mean([one["norm"] for one in rows])
            small = mean([one["small"] for one in rows])
            start = [f"{time}, step {rows[0]['step']:,}", length, medians]
            cells.append([*start, f"{norms.mean:.2g}", str(small)])
    return [
        "",
        "## The recurrent gradient in the middle and at the end of training",
        "",
        f"{setting.name}, {seeds} seed(s): entries of the gradient of the loss at the last "
        f"character with respect to the recurrent weights, {ROWS} sequences of the held-out text, "
        "in float64. Small entries are those below a thousandth of the largest.",
        "",
        *table(
            ["", "length", "median entry, by seed", "norm", "share of small entries [95 % t]"],
            cells,
        ),
        "",
        f"![histograms of the entries, by seed]({picture.name})",
    ]


def _measure(folder: Path, task: Task, length: int) -> dict[str, Any]:
    model = load_recurrent(folder).double().eval()
    batch = task.sample(ROWS, length=length, generator=seeded(0))
    tokens, targets = last_scored(batch)
    (gradient, *_) = Run(model, tokens).weight_gradients(targets)
    size = gradient.abs()
    small = float((size < SMALL * size.max()).double().mean())
    return {**histogram(gradient), "small": small}


def _picture(found: Sequence[dict[str, Any]], name: str) -> bytes:
    """Plots one panel per length and time, with one line per seed."""
    times = ("middle", "end")
    figure = new_figure(3.2 * len(LENGTHS), 5.2)
    panels = figure.subplots(len(times), len(LENGTHS), sharex=True, sharey=True, squeeze=False)
    centres = [(low + high) / 2 for low, high in pairwise(BINS)]
    for row, time in zip(panels, times, strict=True):
        for panel, length in zip(row, LENGTHS, strict=True):
            for one in found:
                if (one["time"], one["length"]) == (time, length):
                    total = sum(one["counts"]) + one["zeros"]
                    shares = [count / total for count in one["counts"]]
                    panel.step(centres, shares, where="mid", label=f"seed {one['seed']}", lw=1.2)
            panel.set(title=f"{time} of training, length {length}", xlim=(-9, 1))
    for panel in panels[-1]:
        panel.set_xlabel("log10 of the entry")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"gradient of the recurrent weights, {name}")
    return png(figure)
