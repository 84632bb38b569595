"""Writes the report of training runs: metrics by step, one line per run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longrnn.diagnostics.curves import curves
from longrnn.evaluation.figures import Line, lines, png
from longrnn.evaluation.report import Picture, write_page
from longrnn.intervals import Estimate
from longrnn.training.run import COUNTS, Run

# The loss of an evaluation between the previous position and this one.
BY_POSITION = re.compile(r"eval_loss_to_(\d+)")
# Metrics that every run logs; further metrics of its task follow.
CAPTIONS = {
    "loss": "Mean loss of the steps since the previous row.",
    "eval_loss": "Loss on the validation rows, over all their positions.",
    "grad_norm": "Norm of the gradient before clipping, on a logarithmic scale.",
    "learning_rate": "Learning rate of the step, before the factors of learning_rate_scale.",
    "tokens_per_second": "Tokens per second of the logged step, over all processes.",
}


def write_report(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the pictures and `report.html`.

    Returns:
        The files, the report first.
    """
    logged = {name for run in runs for row in run.rows for name in row}
    names = [name for name in CAPTIONS if name in logged]
    by_position = {name for name in logged if BY_POSITION.fullmatch(name)}
    names += sorted(logged - CAPTIONS.keys() - set(COUNTS) - by_position)
    pictures = [_picture(runs, name) for name in names]
    if by_position:
        pictures.append(_by_position(runs))
    values = {"runs": runs, "summary": summary(runs), "differences": differences(runs)}
    return write_page("training.html", folder, pictures, values)


def summary(runs: Sequence[Run]) -> str:
    """Describe the last loss and step of each run in one sentence."""
    stands = []
    for run in runs:
        loss, steps = run.last("loss"), run.rows[-1]["step"]
        last = "no finite loss" if loss is None else f"loss {loss:.4g}"
        of = run.settings.get("max_steps")
        stands.append(f"{run.name}: {last} after {steps:,}{f' of {of:,}' if of else ''} steps")
    return f"{'; '.join(stands)}."


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the settings that differ between runs, with the value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "output_dir")
    table = [(key, [run.settings.get(key, "–") for run in runs]) for key in keys]
    return [(key, values) for key, values in table if any(v != values[0] for v in values)]


def _picture(runs: Sequence[Run], name: str) -> Picture:
    drawn = {
        run.name: [(row["step"], row[name]) for row in run.rows if name in row] for run in runs
    }
    rows = "validation rows" if name.startswith("eval_") else "training batches"
    caption = CAPTIONS.get(name, f"A score of the task, on its {rows}.")
    title = name.replace("_", " ")
    return Picture(name, caption, curves(drawn, across="step", up=title, log=name == "grad_norm"))


def _by_position(runs: Sequence[Run]) -> Picture:
    """The validation loss by position, at the first and the last evaluation of each run."""
    drawn = []
    for run in runs:
        found = [(row["step"], _curve(row)) for row in run.rows if _curve(row)]
        for step, curve in (found[0], found[-1]) if found else ():
            values = [Estimate(loss, loss, loss, 1) for _, loss in curve]
            drawn.append(Line(f"{run.name}, step {step:,}", [at for at, _ in curve], values))
    caption = (
        "Validation loss by position at the first and the last evaluation; each point is the mean "
        "since the one before."
    )
    figure = lines(drawn, across="tokens read", up="nats per token")
    return Picture("eval_loss_by_position", caption, png(figure))


def _curve(row: dict[str, Any]) -> list[tuple[int, float]]:
    """Position and loss of an evaluation; empty for another row."""
    found = [(match, row[name]) for name in row if (match := BY_POSITION.fullmatch(name))]
    return sorted((int(match[1]), value) for match, value in found)
