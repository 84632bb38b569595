"""Test whether the loss of a recurrent model grows with its vocabulary, with and without positions.

    python scripts/study_vocabulary.py --vocab-sizes 256,1024,4096,16384
    python scripts/study_vocabulary.py --cell lstm --cell gru --vocab-sizes 256 --lengths 2,4,8

Reverse ordering (`configs/train/reverse_study.yaml`) with every combination of cell, length,
vocabulary, encoding and seed, all with the same steps and rows. Head and embedding share their
weights: with a head of its own, a model must see each token many times, for which a CPU has no time
where there are 16,384. The loss is that of 1,024 held-out sequences. For each encoding and seed,
the script fits the slope of the loss over the logarithm of the vocabulary (or of the length, if
only lengths differ), and compares the slopes seed by seed. Runs are trained one after the other in
this process. The same command resumes an interrupted study; seeds come first, so that an
interrupted one has complete comparisons.
"""

from __future__ import annotations

import itertools
import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from longrnn.sweep.grid import expand
from longrnn.sweep.table import shown, table, verdict

from longrnn.cells import MIXERS
from longrnn.config import load_config
from longrnn.data import SequenceTask
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.intervals import mean
from longrnn.positions import POSITIONS
from longrnn.programs import run_script
from longrnn.results import Results, Row
from longrnn.training.config import TrainConfig
from longrnn.training.trainer import Trainer
from longrnn.units import parse_lengths

CONFIG = Path(__file__).parents[1] / "configs/train/reverse_study.yaml"
ENCODINGS = ["none", "duplicate", "sinusoidal", "learned", "random"]
# As in arXiv 2402.00236.
SEEDS = [111, 222, 333, 444, 555]
# Keys of a grid, in the order of the fields of `Settings`.
KEYS = ["mixer.kind", "length.max", "vocab_size", "position.kind", "seed"]
# Held-out sequences of one forward pass.
ROWS = 128


class Settings(NamedTuple):
    """What one run is; all runs have the same steps, rows and width."""

    cell: str
    length: int
    vocab_size: int
    encoding: str
    seed: int


class Common(NamedTuple):
    """What all runs share."""

    steps: int
    rows: int
    width: int
    learning_rate: float


def main(
    vocab_sizes: Annotated[str, typer.Option(help="Vocabulary sizes.")] = "256,1024,4096,16384",
    lengths: Annotated[str, typer.Option(help="Lengths of the sequences.")] = "4",
    cell: Annotated[list[str], typer.Option(help="Cell; may be given several times.")] = ["mamba2"],  # noqa: B006
    encoding: Annotated[
        list[str], typer.Option(help="Positional encoding; may be given several times.")
    ] = ENCODINGS,
    seeds: Annotated[int, typer.Option(help="Runs of each combination, from 2 to 5.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 400,
    rows: Annotated[int, typer.Option(help="Rows of a training step.")] = 64,
    width: Annotated[int, typer.Option(help="d_model of all models.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-2,
    hardware: Annotated[
        str, typer.Option(help="Hardware, as the document describes it.")
    ] = "one CPU",
    output: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/vocabulary"),
    document: Annotated[Path, typer.Option(help="Document to write.")] = Path(
        "benchmarks/results/vocabulary_cpu.md"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Trains and evaluates the models, and writes the document."""
    if not 2 <= seeds <= len(SEEDS):
        raise UserError(
            f"seeds must be from 2 (for an interval) to {len(SEEDS)}, not {seeds}: give such a "
            "number"
        )
    axes = parse_lengths(vocab_sizes), parse_lengths(lengths)
    if (len(axes[0]) > 1) == (len(axes[1]) > 1):
        raise UserError(
            "a slope needs either several --vocab-sizes or several --lengths, not both: give one "
            "of them a single value"
        )
    for name in cell:
        MIXERS[name]  # refuses an unknown name before anything is trained
    for name in encoding:
        POSITIONS[name]
    common = Common(steps, rows, width, learning_rate)
    wanted = [
        Settings(kind, length, size, position, seed)
        for seed, kind, length, size, position in itertools.product(
            SEEDS[:seeds], cell, axes[1], axes[0], encoding
        )
    ]
    results = Results(output / "results.jsonl", {"study": "vocabulary", **common._asdict()})
    done = {Settings(*(row[key] for key in Settings._fields)) for row in results.rows}
    for number, one in enumerate(wanted):
        if one not in done:
            results.append([measure(one, common, output)])
            if not quiet:
                print(f"{number + 1} of {len(wanted)}: {results.rows[-1]}", file=sys.stderr)
    of_settings = {Settings(*(row[key] for key in Settings._fields)): row for row in results.rows}
    lines = report([of_settings[one] for one in wanted], common, hardware)
    write_atomic(document, "\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def measure(settings: Settings, common: Common, output: Path) -> Row:
    """Trains one model and returns its row: settings, loss and accuracy on held-out sequences.

    The folder of the run is removed, because only its row is needed.
    """
    base = load_config(
        TrainConfig,
        CONFIG,
        [
            f"model.d_model={common.width}",
            "model.tie_embeddings=true",
            f"max_steps={common.steps}",
            f"warmup_steps={max(1, common.steps // 20)}",
            f"per_device_train_batch_size={common.rows}",
            f"learning_rate={common.learning_rate}",
            f"save_steps={common.steps}",
        ],
    )
    axes = {key: [str(value)] for key, value in zip(KEYS, settings, strict=True)}
    [run] = expand(base, axes, output / "runs")
    config = run.config
    trainer = Trainer(config, resume=True, quiet=True)
    task = trainer.task
    assert isinstance(task, SequenceTask)
    trainer.train()
    objective = trainer.accelerator.unwrap_model(trainer.objective).eval()
    losses, right = [], []
    with torch.no_grad():
        for start in range(0, task.n_held_out, ROWS):
            stop = min(start + ROWS, task.n_held_out)
            batch = task.evaluation_batch(start, stop, length=settings.length)
            found = objective([batch], objective.model.init_state(stop - start))
            losses.append(float(found.loss) * (stop - start))
            right += task.score(found.predictions[0], batch)["token_accuracy"].tolist()
    shutil.rmtree(config.output_dir)
    scores = {"loss": sum(losses) / task.n_held_out, "accuracy": sum(right) / len(right)}
    return {**settings._asdict(), **scores}


def report(rows: Sequence[Row], common: Common, hardware: str) -> list[str]:
    """Returns the document in Markdown."""
    axis = "vocab_size" if len({row["vocab_size"] for row in rows}) > 1 else "length"
    seeds = len({row["seed"] for row in rows})
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    lines = [
        f"# Reverse ordering: the loss by {'vocabulary' if axis == 'vocab_size' else 'length'}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {hardware}, torch {torch.__version__}. One layer, width "
        f"{common.width}, {common.steps:,} steps of {common.rows} rows, peak learning rate "
        f"{common.learning_rate:g}, {seeds} seeds, head and embedding share their weights; "
        "everything else as in `configs/train/reverse_study.yaml`. Loss in nats per token of 1,024 "
        "held-out sequences; a model that has learned nothing has ln V. Intervals are over seeds "
        "(Student t, 95 %).",
        "",
        "```",
        shlex.join(["python", "scripts/study_vocabulary.py", *sys.argv[1:]]),
        "```",
    ]
    for cell in cells:
        of_cell = [row for row in rows if row["cell"] == cell]
        fixed = "length" if axis == "vocab_size" else "vocab_size"
        about = f"{'length' if fixed == 'length' else 'V'} {of_cell[0][fixed]:,}"
        lines += ["", f"## {cell}, {about}", "", *scores(of_cell, axis), ""]
        lines += slopes(of_cell, axis)
    return lines


def scores(rows: Sequence[Row], axis: str) -> list[str]:
    """Returns a table of the loss and accuracy for each encoding and value of the axis."""
    places = sorted({row[axis] for row in rows})
    head = ["encoding", "", *(f"{'V' if axis == 'vocab_size' else 'length'} {n:,}" for n in places)]
    cells = []
    for encoding in dict.fromkeys(row["encoding"] for row in rows):
        for metric in ("loss", "accuracy"):
            found = [
                mean([r[metric] for r in rows if (r["encoding"], r[axis]) == (encoding, place)])
                for place in places
            ]
            cells.append([encoding, metric, *map(shown, found)])
    chance = [math.log(n if axis == "vocab_size" else rows[0]["vocab_size"]) for n in places]
    cells.append(["chance", "loss", *(f"{nats:.3f}" for nats in chance)])
    return table(head, cells)


def slopes(rows: Sequence[Row], axis: str) -> list[str]:
    """Returns a table of the slope of the loss per doubling of the axis, and the answers.

    The slope of each seed is that of least squares over the logarithm of the axis; slopes are
    compared seed by seed.
    """
    encodings = list(dict.fromkeys(row["encoding"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    by_seed = {
        encoding: [
            slope([r for r in rows if (r["encoding"], r["seed"]) == (encoding, seed)], axis)
            for seed in seeds
        ]
        for encoding in encodings
    }
    cells, words = [], {"higher": "grows", "lower": "falls", "inconclusive": "inconclusive"}
    for encoding in encodings:
        own = mean(by_seed[encoding])
        row = [encoding, shown(own), words[verdict(own)]]
        for other in ("none", "duplicate"):
            if other == encoding or other not in by_seed:
                row += ["–", "–"]
                continue
            pairs = zip(by_seed[encoding], by_seed[other], strict=True)
            less = mean([a - b for a, b in pairs])
            row += [shown(less), verdict(less)]
        cells.append(row)
    head = ["encoding", "nats per doubling", "the loss", "minus none", "verdict"]
    return table([*head, "minus duplicate", "verdict"], cells)


def slope(rows: Sequence[Row], axis: str) -> float:
    """Returns the slope of the loss per doubling of the axis, by least squares."""
    x = np.log2([row[axis] for row in rows])
    return float(np.polyfit(x, [row["loss"] for row in rows], 1)[0])


if __name__ == "__main__":
    run_script(main, __doc__)
