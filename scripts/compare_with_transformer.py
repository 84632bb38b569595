"""Compare a transformer, a Mamba-2 and an LSTM of equal size and training on longer texts.

    python scripts/compare_with_transformer.py --record FILE

Each is trained with the trainer of `longrnn train` on rows of one length that start from the zero
state: on pairs to recall, on passkeys, and on books. Every architecture has a grid of learning
rates; a run ends when its recall on validation rows reaches 95 %, or after all its steps. The rate
that is best by validation is repeated with further seeds. Then `longrnn compare` measures these
models at the training length and beyond it: right answers, keys recalled, bits per byte on held-out
books, speed, memory. The transformer refuses texts longer than its maximum length;
`transformer+beyond` is the same model without that limit. The same command resumes an interrupted
study and skips what is finished.
"""

from __future__ import annotations

import math
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from longrnn.comparison.compare import compare, markdown, tables  # noqa: E402
from longrnn.comparison.suites import read_suite  # noqa: E402
from longrnn.diagnostics.comparison import write_report  # noqa: E402
from longrnn.studies.equal_models import NAMES, shapes  # noqa: E402
from longrnn.studies.learning_rates import (  # noqa: E402
    Goal,
    Trial,
    at_best_rate,
    best,
    run_folder,
    search,
    table,
)

from benchmarks.timing import cpu_model  # noqa: E402
from longrnn.errors import UserError, nearest  # noqa: E402
from longrnn.files import write_atomic  # noqa: E402
from longrnn.hf.opened import OpenCheckpoint, open_checkpoint  # noqa: E402
from longrnn.programs import run_script  # noqa: E402
from longrnn.text import read_text  # noqa: E402
from longrnn.units import parse_length  # noqa: E402

TRAIN = ("war_and_peace", "les_miserables", "karamazov_brothers", "don_quixote")
HELD_OUT = ("moby_dick", "tom_sawyer")
# Tokens per training step.
STEP_TOKENS = 4096
# Positions of the transformer beyond the training length: for an answer, or what `cost` generates.
EXTRA_POSITIONS = 32
# The others are compared with the first one, which can be evaluated at every length.
VARIANTS = {"transformer": ("+beyond", ""), "mamba2": ("",), "lstm": ("",)}
# Ids of the pairs to recall: half of them are keys.
RECALL_VOCABULARY = 64
RATES = "1e-3,3e-3,1e-2"
# Recall of validation rows from which on a task counts as learned, and number of these rows.
LEARNED, VALIDATION_ROWS = 0.95, 64


class Kind(NamedTuple):
    """What models are trained on and measured with.

    Attributes:
        task: in training.
        validation: the same for validation.
        length: of a training row, as the task counts it.
        steps: the most steps of a run.
        score: the validation score that a run must reach; None to train all steps.
        evaluations: of all models, at the training length and beyond.
        costs: of the best run of each architecture.
    """

    task: dict[str, Any]
    validation: dict[str, Any]
    length: int
    steps: int
    score: str | None
    evaluations: list[dict[str, Any]]
    costs: list[dict[str, Any]]


def main(
    train: Annotated[
        list[Path] | None, typer.Option(help="Books to train on.", show_default="four in data/")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Held-out books.", show_default="two in data/")
    ] = None,
    tasks: Annotated[str, typer.Option(help="What to train on.")] = "recall,passkey,books",
    train_length: Annotated[str, typer.Option(help="Length of a training row in tokens.")] = "256",
    pairs: Annotated[int, typer.Option(help="Pairs to recall in a training row.")] = 8,
    recall_steps: Annotated[int, typer.Option(help="Most training steps on recall.")] = 4000,
    passkey_steps: Annotated[int, typer.Option(help="Most training steps on passkeys.")] = 4000,
    books_steps: Annotated[int, typer.Option(help="Training steps on books.")] = 500,
    rates: Annotated[
        list[str] | None,
        typer.Option(
            help="Learning rates of all architectures, or of one: lstm=3e-3,1e-2; repeatable.",
            show_default=RATES,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds at the best learning rate.")] = 3,
    check_every: Annotated[int, typer.Option(help="Steps between two validations.")] = 250,
    step_tokens: Annotated[int, typer.Option(help="Tokens per training step.")] = STEP_TOKENS,
    size: Annotated[str, typer.Option(help="Parameters of each model: 250k or 120k.")] = "250k",
    reach: Annotated[
        int, typer.Option(help="Longest text, as a multiple of the training length.")
    ] = 64,
    n: Annotated[int, typer.Option("--n", help="Prompts per length and depth.")] = 8,
    windows: Annotated[int, typer.Option(help="Windows of each held-out book.")] = 4,
    output: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path(
        "runs/compare-with-transformer"
    ),
    record: Annotated[Path | None, typer.Option(help="Also write the tables to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Trains and compares the models, and prints tables in Markdown."""
    length, grid = parse_length(train_length), parse_rates(rates or [RATES])
    counts = (recall_steps, passkey_steps, books_steps, reach, n, windows, pairs, step_tokens)
    if min(*counts, seeds, check_every) < 1:
        raise UserError("steps, sizes and counts must be at least 1: give larger ones")
    books = train or [Path(f"data/{book}.txt") for book in TRAIN]
    held_out = text or [Path(f"data/{book}.txt") for book in HELD_OUT]
    known = {
        "recall": lambda: recall(pairs, recall_steps, reach, n),
        "passkey": lambda: passkey(length, passkey_steps, reach, n),
        "books": lambda: reading(length, books_steps, reach, books, held_out, windows),
    }
    for name in tasks.split(","):
        if name not in known:
            raise UserError(f"--tasks: no task {name!r}: {nearest(name, known)}")
    kinds = {name: known[name]() for name in tasks.split(",")}
    lines = heading(seeds, check_every, step_tokens)
    for name, kind in kinds.items():
        every = kind.steps if kind.score is None else check_every
        goal = Goal(kind.score, LEARNED, every)
        lines += study(name, kind, grid, goal, seeds, size, step_tokens, output / name, quiet)
        # Written after each kind of data, so that an interrupted study has its first tables.
        for path in filter(None, (output / "table.md", record)):
            write_atomic(path, "\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def recall(pairs: int, steps: int, reach: int, n: int) -> Kind:
    """Pairs of a key and a value; a longer row has more pairs."""
    # Keys and values of the longest row must differ.
    lengths = [
        2 * pairs * 2**k
        for k in range(20)
        if 2**k <= reach and 2 * pairs * 2**k <= RECALL_VOCABULARY
    ]
    task = {"kind": "recall", "vocab_size": RECALL_VOCABULARY}
    evaluation = {"kind": "task", "name": "recall", "task": task, "lengths": lengths, "n": 8 * n}
    costs = [{"kind": "cost", "lengths": [3 * pairs, 1024, 4096]}]
    return Kind(task, task, 2 * pairs, steps, "token_accuracy", [evaluation], costs)


def passkey(length: int, steps: int, reach: int, n: int) -> Kind:
    """One key in filler; a longer row has more filler."""
    lengths = lengths_of(length, reach)
    evaluation = {"kind": "passkey", "lengths": lengths, "depths": [0.0, 0.5, 1.0], "n": n}
    task = {"kind": "passkey"}
    costs = [{"kind": "cost", "lengths": lengths}]
    return Kind(task, task, length, steps, "accuracy", [evaluation], costs)


def reading(
    length: int, steps: int, reach: int, books: list[Path], held_out: list[Path], windows: int
) -> Kind:
    """Books; validation reads the parts of the training books that are held out."""
    for path in (*books, *held_out):
        read_text(path)  # refuses a missing book before the training begins
    task = {"kind": "text", "files": list(map(str, books))}
    evaluation = {
        "kind": "perplexity",
        "texts": list(map(str, held_out)),
        "lengths": lengths_of(length, reach),
        "windows": windows,
    }
    parts = [{**task, "part": part} for part in ("training", "held_out")]
    return Kind(parts[0], parts[1], length, steps, None, [evaluation], [])


def lengths_of(length: int, reach: int) -> list[int]:
    """Returns the training length and its multiples by powers of 4."""
    return [length * 4**k for k in range(20) if 4**k <= reach]


def parse_rates(items: Sequence[str]) -> dict[str, list[float]]:
    """Returns the learning rates of each architecture, from `RATES` and `NAME=RATES`."""
    found: dict[str, list[float]] = {}
    for item in sorted(items, key=lambda one: "=" in one):
        name, equals, values = item.rpartition("=")
        if equals and name not in NAMES:
            raise UserError(f"--rates: no architecture {name!r}: {nearest(name, NAMES)}")
        try:
            numbers = [float(value) for value in values.split(",")]
        except ValueError as error:
            raise UserError(
                f"--rates: {item!r} is not a list of learning rates: write them as in lstm={RATES}"
            ) from error
        found |= dict.fromkeys([name] if equals else NAMES, numbers)
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise UserError(f"--rates: none for {missing[0]}: give --rates {RATES} for all, too")
    return found


def study(
    name: str,
    kind: Kind,
    grid: dict[str, list[float]],
    goal: Goal,
    seeds: int,
    size: str,
    step_tokens: int,
    folder: Path,
    quiet: bool,
) -> list[str]:
    """Trains and compares the models on one kind of data, and returns the lines of its record."""
    suites = {}
    for part, evaluations in ((name, kind.evaluations), ("cost", kind.costs)):
        if evaluations:
            write_atomic(folder / f"{part}.yaml", yaml.safe_dump({"evaluations": evaluations}))
            suites[part] = read_suite(str(folder / f"{part}.yaml"))
    trials = {}
    for model in NAMES:
        base = configuration(model, shapes(size)[model], kind, step_tokens)
        trials[model] = search(
            model, base, grid[model], seeds=seeds, goal=goal, folder=folder / model, quiet=quiet
        )
    lines = [f"\n## {name}\n", f"At most {kind.steps:,} steps.", ""]
    lines += table([trial for runs in trials.values() for trial in runs])
    chosen = {model: best(at_best_rate(runs)) for model, runs in trials.items()}
    if any(math.isinf(run.loss) for run in chosen.values()):
        return [*lines, "", "An architecture failed at every rate; nothing was compared."]
    best_ones = [one for model, run in chosen.items() for one in variants(folder, model, run)]
    cells = [
        cell
        for suite in suites.values()
        for cell in compare(best_ones, [suite], output=folder / "compare", quiet=quiet)
    ]
    about = {one.name: f"{one.checkpoint}, trained on {name}" for one in best_ones}
    texts = {part: suite.text for part, suite in suites.items()}
    write_report(cells, folder / "compare", models=about, suites=texts)
    lines += ["", *sizes(best_ones)]
    for found in tables(cells):
        lines += ["", *markdown(found)]
    others = [
        one
        for model, runs in trials.items()
        for run in at_best_rate(runs)
        if run != chosen[model] and math.isfinite(run.loss)
        for one in variants(folder, model, run, numbered=True)[:1]
    ]
    if others:
        again = compare(others, [suites[name]], output=folder / "seeds", quiet=quiet)
        lines += ["", "The other seeds at the same learning rates:"]
        for found in tables(again):
            lines += ["", *markdown(found)]
    return lines


def variants(
    folder: Path, model: str, run: Trial, *, numbered: bool = False
) -> list[OpenCheckpoint]:
    """Opens the checkpoint of a run, the transformer with and without its limit."""
    path = run_folder(folder / model, run.rate, run.seed)
    label = f", seed {run.seed}" if numbered else ""
    return [
        open_checkpoint(f"{path}{suffix}", name=f"{model}{suffix}{label}")
        for suffix in VARIANTS[model]
    ]


def configuration(name: str, shape: dict[str, Any], kind: Kind, step_tokens: int) -> dict[str, Any]:
    """Returns the training configuration of one architecture; only the model differs."""
    if name == "transformer":
        width = 3 * kind.length // 2 if kind.task["kind"] == "recall" else kind.length
        positions = {"max_position_embeddings": width + EXTRA_POSITIONS}
        shape = {"transformer": shape["transformer"] | positions}
    return {
        **shape,
        "task": kind.task,
        "validation": kind.validation,
        "eval_length": kind.length,
        "eval_samples": VALIDATION_ROWS,
        "length": {"max": kind.length},
        "per_device_train_batch_size": max(1, step_tokens // kind.length),
        "max_steps": kind.steps,
        # A run with a goal ends at an unknown step, so its rate cannot be lowered towards the end.
        "lr_scheduler_type": "cosine" if kind.score is None else "constant",
        "warmup_steps": max(1, min(100, kind.steps // 5)),
        "weight_decay": 0.1,
        "save_steps": 10**6,
        "save_total_limit": 1,
        "logging_steps": 50,
        "on_spike": "ignore",
    }


def heading(seeds: int, check_every: int, step_tokens: int) -> list[str]:
    """Returns the title and the paragraph on commands, hardware and settings."""
    return [
        "# A transformer, a Mamba-2 and an LSTM on longer texts than they were trained on",
        "",
        f"`python {shlex.join(sys.argv)}`, {datetime.now(UTC):%Y-%m-%d}, {cpu_model()}, "
        f"{torch.get_num_threads()} thread(s), Python {platform.python_version()}, torch "
        f"{torch.__version__}.",
        "",
        f"Rows start from the zero state; {step_tokens:,} tokens per step. Every learning rate is "
        f"trained with one seed, the best by validation with {seeds} (bold). On recall and "
        f"passkeys the rate is constant after a warm-up, and a run ends when {LEARNED:.0%} of the "
        f"answers in {VALIDATION_ROWS} validation rows are right, checked every {check_every:,} "
        "steps; on books the schedule is a cosine. In the tables of runs: the median over seeds "
        "(lowest to highest). In the other tables: lengths of the evaluation in tokens (of "
        "recall: of the pairs), in brackets 95 % intervals; below a value its paired difference "
        "from `transformer+beyond` on the same items. `transformer+beyond` is the same transformer "
        "without its limit on the length. Peak memory is that of the process, including "
        "libraries (a transformer also loads those of transformers).",
    ]


def sizes(models: Sequence[OpenCheckpoint]) -> list[str]:
    """Returns one line with the number of parameters of each model."""
    counts = {}
    for one in models:
        module: Any = one.model
        counts[one.name.partition("+")[0]] = sum(p.numel() for p in module.parameters())
    return [f"Parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}."]


if __name__ == "__main__":
    run_script(main, __doc__)
