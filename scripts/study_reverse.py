"""Test whether positional encodings help recurrent models with large vocabularies.

    python scripts/study_reverse.py --jobs 2

Reverse ordering (configs/train/reverse_study.yaml) with every cell and every encoding, the LSTM
also with a larger vocabulary and with rare tokens, each with several seeds; gradient stability
along the LSTM's checkpoints. The control is a duplicate of the token embedding: as wide as an
encoding, but without positions; the others are compared with it seed by seed. Writes a document
with tables and with verdicts that follow from the intervals alone: inconclusive if an interval
contains 0. The same command resumes an interrupted study; more seeds add to its results.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from longrnn.sweep.grid import Axes, expand
from longrnn.sweep.runs import Sweep
from longrnn.sweep.table import differences, means, shown, table, verdict

from longrnn.cells import MIXERS
from longrnn.config import load_config
from longrnn.data import TASKS, Transduction
from longrnn.diagnostics.plots import new_figure, png
from longrnn.errors import UserError, nearest
from longrnn.files import write_atomic
from longrnn.intervals import Estimate, mean
from longrnn.programs import run_script
from longrnn.results import Row
from longrnn.studies import attribution
from longrnn.studies.stability import along_checkpoints
from longrnn.training.config import TrainConfig

CONFIG = Path(__file__).parents[1] / "configs/train/reverse_study.yaml"
SEEDS = ["111", "222", "333", "444", "555"]
CELLS = ["lstm", "gru", "rnn", "mamba2"]
ENCODINGS = ["none", "duplicate", "sinusoidal", "learned", "random"]
CONTROL = "duplicate"
METRIC = "token_accuracy"
METRICS = [METRIC, "exact_match", "edit_distance"]


class Part(NamedTuple):
    """One sweep of the study, with its results."""

    title: str
    base: TrainConfig
    axes: Axes
    rows: list[Row]


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each combination, from 2 to 5.")] = 3,
    vocab_size: Annotated[
        int, typer.Option(help="Vocabulary size of the grid of all cells.")
    ] = 256,
    large: Annotated[
        int, typer.Option(help="Vocabulary size of the second grid of the LSTM.")
    ] = 1024,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            help="Cell of the first grid; may be given several times.", show_default="all"
        ),
    ] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option(help="Positional encoding; may be given several times.", show_default="all"),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Part of the study: cells, large or dual.", show_default="all"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps of each run.", show_default="as in the configuration"),
    ] = None,
    triplets: Annotated[int, typer.Option(help="Triplets of the gradient stability.")] = 1024,
    jobs: Annotated[int, typer.Option(help="Runs at the same time.")] = 2,
    hardware: Annotated[str, typer.Option(help="Hardware, as the document describes it.")] = "",
    output: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/reverse-study"),
    document: Annotated[Path, typer.Option(help="Document to write.")] = Path(
        "benchmarks/results/reverse_cpu.md"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Trains and evaluates the models, and writes the document."""
    if not 2 <= seeds <= 5:
        raise UserError(
            f"seeds must be from 2 (for an interval) to 5, not {seeds}: give such a number"
        )
    base = load_config(TrainConfig, CONFIG, [] if steps is None else _steps(steps))
    grids = study_grids(cell or CELLS, encoding or ENCODINGS, vocab_size, large, SEEDS[:seeds])
    for name in part or []:
        if name not in grids:
            raise UserError(f"unknown part {name!r}: {nearest(name, grids)}")
    grids = {name: grid for name, grid in grids.items() if part is None or name in part}
    plans = {
        title: expand(base, axes, output / name / "runs") for name, (title, axes) in grids.items()
    }
    parts: dict[str, Part] = {}
    for name, (title, axes) in grids.items():
        rows, failures = Sweep(plans[title], output / name, jobs=jobs, quiet=quiet).run()
        if failures:
            listed = "; ".join(f"{f.name} ({f.reason})" for f in failures)
            raise UserError(f"runs failed; give the same command to run them again: {listed}")
        parts[name] = Part(title, base, axes, rows)
    stability = []
    if "dual" in parts:
        runs = output / "dual/runs"
        stability = stability_lines(parts["dual"], runs, triplets, quiet)
        stability += attribution_lines(parts["dual"], runs, quiet)
    plot = document.with_suffix(".png")
    plotted = [found for name, found in parts.items() if name != "dual"]
    picture(plotted or list(parts.values()), plot)
    image = ["", f"![token accuracy of every run (points) and their means (bars)]({plot.name})"]
    lines = [*preamble(base, seeds, hardware), *image, *chapters(parts), *stability]
    write_atomic(document, "\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def study_grids(
    cells: list[str], encodings: list[str], vocab_size: int, large: int, seeds: list[str]
) -> dict[str, tuple[str, Axes]]:
    """Returns title and axes of every grid, by the name of its folder."""
    for kind in cells:
        MIXERS[kind]  # refuses an unknown cell before the training begins
    if CONTROL not in encodings:
        raise UserError(f"all encodings are compared with {CONTROL}: add --encoding {CONTROL}")
    # The seed comes first, so that an interrupted study has complete comparisons.
    all_cells: Axes = {"seed": seeds, "mixer.kind": cells, "position.kind": encodings}
    lstm: Axes = all_cells | {"mixer.kind": ["lstm"]}
    three = [kind for kind in encodings if kind in ("none", CONTROL, "sinusoidal")]
    dual: Axes = lstm | {"position.kind": three, "task.kind": ["reverse_dual_frequency"]}
    small: Axes = {"vocab_size": [str(vocab_size)]}
    wide: Axes = {"vocab_size": [str(large)]}
    return {
        "cells": (f"All cells, V = {vocab_size:,}", all_cells | small),
        "large": (f"LSTM, V = {large:,}", lstm | wide),
        "dual": (f"LSTM, V = {vocab_size:,}, half of it rare", dual | small),
    }


def _steps(steps: int) -> list[str]:
    """Returns the settings of a run of `steps` steps with four checkpoints."""
    every = max(1, steps // 4)
    return [f"max_steps={steps}", f"save_steps={every}", f"warmup_steps={max(1, steps // 20)}"]


def preamble(base: TrainConfig, seeds: int, hardware: str) -> list[str]:
    """Returns title, hardware, settings and command of the document."""
    assert base.model is not None  # `reverse_study.yaml` has one
    where = hardware or f"{os.cpu_count()} cores, {platform.machine()}, no GPU"
    return [
        "# Reverse ordering with five positional encodings, on a CPU",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {where}. One layer, hidden and embedding "
        f"{base.model.d_model}, length {base.length.max}, {base.max_steps:,} steps of "
        f"{base.per_device_train_batch_size} rows, {seeds} seeds; everything else as in "
        "`configs/train/reverse_study.yaml`. Scores are those of 1,024 sequences that training "
        "never saw. Intervals are over seeds (Student t, 95 %); a single one is wrong in one of "
        "twenty cases, and there are many here. `docs/studies.md` has question and setting.",
        "",
        "```",
        shlex.join(["python", "scripts/study_reverse.py", *sys.argv[1:]]),
        "```",
    ]


def chapters(parts: dict[str, Part]) -> Iterator[str]:
    """Yields the tables and the verdict of every part."""
    for name, part in parts.items():
        yield from ["", f"## {part.title}", ""]
        conditions = conditions_of(part) if name == "dual" else []
        yield from scores(part, conditions or METRICS)
        yield from ["", *verdicts(part, conditions or [METRIC])]


def conditions_of(part: Part) -> list[str]:
    """Returns the four conditions of the dual-frequency test."""
    return [name for name in part.rows[0]["metrics"] if name.endswith("disturbants")]


def scores(part: Part, metrics: Sequence[str]) -> list[str]:
    """Returns a table of means over seeds."""
    cells = [
        [values["mixer.kind"], values["position.kind"], *(shown(found[m]) for m in metrics)]
        for values, found in means(part.rows, part.axes)
    ]
    return table(["cell", "encoding", *(metric.replace("_", " ") for metric in metrics)], cells)


def verdicts(part: Part, metrics: Sequence[str]) -> list[str]:
    """Returns a table of differences from the control and from no encoding, with verdicts."""
    lines, cells = [], []
    for metric in metrics:
        from_control = differences(part.rows, part.axes, ("position.kind", CONTROL), metric)
        from_none = differences(part.rows, part.axes, ("position.kind", "none"), metric)
        plain = {tuple(d.values.values()): d.estimate for d in from_none}
        for one in from_control:
            cell, encoding = one.values["mixer.kind"], one.values["position.kind"]
            other = plain.get(tuple(one.values.values()))
            row = [cell, encoding, shown(one.estimate), one.verdict]
            row += ["–", "–"] if other is None else [shown(other), verdict(other)]
            cells.append([*([metric] if len(metrics) > 1 else []), *row])
    head = ["cell", "encoding", f"minus {CONTROL}", "verdict", "minus none", "verdict"]
    lines += table([*(["of"] if len(metrics) > 1 else []), *head], cells)
    counts = [row[-3] for row in cells if row[-5] != "none"]
    counted = ", ".join(f"{counts.count(v)} {v}" for v in ("higher", "lower", "inconclusive"))
    return [
        *lines,
        "",
        f"**Verdict.** Of {len(counts)} comparisons of a positional encoding with the {CONTROL} "
        f"control: {counted}.",
    ]


def stability_lines(part: Part, folder: Path, n: int, quiet: bool) -> list[str]:
    """Returns the gradient stability of the LSTM by condition and checkpoint: means over seeds."""
    task = dual_task(part)
    found: dict[tuple[str | None, str, int], list[tuple[float, ...]]] = {}
    for row in part.rows:
        measured = along_checkpoints(
            folder / row["run"], task, length=part.base.length.max, n=n, quiet=quiet
        )
        for one in measured:
            key = one.condition, row["values"]["position.kind"], one.step
            means_of = (one.same_token, one.same_suffix, one.norm)
            found.setdefault(key, []).append(tuple(estimate.mean for estimate in means_of))
    cells, verdicts_of = [], []
    places = {condition.name: index for index, condition in enumerate(task.conditions())}
    # The sort is stable: within a condition, encodings and steps keep their order.
    for (condition, encoding, step), runs in sorted(found.items(), key=lambda i: places[i[0][0]]):
        token, suffix, norm = (mean(values) for values in zip(*runs, strict=True))
        against = ["–", "–"]
        if encoding != CONTROL:
            # For every encoding, runs are in the order of their seeds.
            pairs = zip(runs, found[condition, CONTROL, step], strict=True)
            less = mean([run[0] - control[0] for run, control in pairs])
            against = [shown(less), verdict(less)]
            if encoding != "none":
                verdicts_of.append(verdict(less))
        row_start = [condition or "all tokens", encoding, f"{step:,}", shown(token)]
        cells.append([*row_start, *against, shown(suffix), short(norm)])
    head = ["condition", "encoding", "step", "same first token", f"minus {CONTROL}", "verdict"]
    counted = ", ".join(f"{verdicts_of.count(v)} {v}" for v in ("higher", "lower", "inconclusive"))
    return [
        "",
        f"## Gradient stability of the LSTM ({n:,} triplets per condition and checkpoint)",
        "",
        *table([*head, "same suffix", "norm of J"], cells),
        "",
        f"**Verdict.** Of {len(verdicts_of)} comparisons of a positional encoding with the "
        f"{CONTROL} control, on inputs that share the first token: {counted}.",
    ]


def dual_task(part: Part) -> Transduction:
    """Returns the task of the part with rare tokens."""
    options = {
        "kind": part.axes["task.kind"][0], "vocab_size": int(part.axes["vocab_size"][0])
    }  # fmt: skip
    task = TASKS.build(part.base.task | options, None)
    assert isinstance(task, Transduction)
    return task


def attribution_lines(part: Part, folder: Path, quiet: bool) -> list[str]:
    """Returns the share of rare tokens in the squared gradient at the embedding, by checkpoint."""
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for row in part.rows:
        measured = attribution.along_checkpoints(
            folder / row["run"], dual_task(part), length=part.base.length.max, quiet=quiet
        )
        for one in measured:
            ratio = one.per_rare_token.mean / one.per_frequent_token.mean
            key = row["values"]["position.kind"], one.step
            found.setdefault(key, []).append((one.rare_share.mean, ratio))
    cells = []
    for (encoding, step), runs in found.items():
        share, ratio = (mean(values) for values in zip(*runs, strict=True))
        less = mean([a[1] - b[1] for a, b in zip(runs, found[CONTROL, step], strict=True)])
        against = ["–", "–"] if encoding == CONTROL else [short(less), verdict(less)]
        cells.append([encoding, f"{step:,}", shown(share), short(ratio), *against])
    head = ["encoding", "step", "share of rare tokens", "a rare row / a frequent row"]
    return [
        "",
        f"## Attribution of the gradient ({attribution.SEQUENCES:,} sequences per checkpoint)",
        "",
        "Squared gradient at the rows of the embedding, as `longrnn diagnose attribution` measures "
        "it. The third column is per token that a sequence has.",
        "",
        *table([*head, f"minus {CONTROL}", "verdict"], cells),
    ]


def picture(parts: Sequence[Part], path: Path) -> None:
    """Plots the token accuracy of every run by encoding, with one panel per cell."""
    panels = [
        (f"{cell}, V = {part.axes['vocab_size'][0]}", part, cell)
        for part in parts
        for cell in part.axes["mixer.kind"]
    ]
    figure = new_figure(2.1 * len(panels) + 0.6, 3.2)
    for axes, (title, part, cell) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        encodings = part.axes["position.kind"]
        for place, encoding in enumerate(encodings):
            chosen = {"mixer.kind": cell, "position.kind": encoding}
            found = [
                row["metrics"][METRIC]
                for row in part.rows
                if chosen.items() <= row["values"].items()
            ]
            axes.plot([place] * len(found), found, "o", ms=4, color="C0", alpha=0.6)
            axes.plot(place, sum(found) / len(found), "_", ms=16, mew=2, color="black")
        axes.set_xticks(range(len(encodings)), encodings, rotation=60, ha="right")
        axes.set(title=title, ylabel=METRIC.replace("_", " "), xlim=(-0.6, len(encodings) - 0.4))
    write_atomic(path, png(figure))


def short(estimate: Estimate) -> str:
    """Returns a mean with its interval, with two significant digits."""
    return f"{estimate.mean:.2g} [{estimate.low:.2g}, {estimate.high:.2g}]"


if __name__ == "__main__":
    run_script(main, __doc__)
