"""Compare policies for the initial state of a row, at equal budget, by the loss on books.

    python scripts/study_initial_states.py
    python scripts/study_initial_states.py --base runs/books-collapse --train-length 128

One model, the base, is trained on books from zero states (`configs/train/books_256.yaml`, or
`--base`). Training then continues with each policy and seed on the same books, with the same
numbers of steps and tokens; the others are compared with `zero`. All models are evaluated on
held-out books, at positions up to 64 times the training length. Intervals are over the seeds of the
continued training; the base has one seed, so they hold for this base only. The same command resumes
an interrupted study and skips finished runs.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from longrnn import load, load_tokenizer
from longrnn.config import build_config, load_config
from longrnn.errors import UserError
from longrnn.evaluation import perplexity as measure
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.texts import Document, read_documents
from longrnn.files import write_atomic
from longrnn.hf.training_length import required_training_length
from longrnn.intervals import Estimate, mean
from longrnn.programs import run_script
from longrnn.results import Row
from longrnn.text import Tokenizer, read_text
from longrnn.training.config import TrainConfig
from longrnn.training.documents import build_corpus
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.trainer import Trainer
from longrnn.units import format_length, parse_length

CONFIG = Path(__file__).parents[1] / "configs/train/books_256.yaml"
TRAIN = ("war_and_peace", "les_miserables", "karamazov_brothers", "don_quixote")
HELD_OUT = ("moby_dick", "tom_sawyer")
# Tokens per step, and segments after which a stream moves on to another document.
STEP_TOKENS, MAX_SEGMENTS = 4096, 64


def main(
    train: Annotated[
        list[Path] | None, typer.Option(help="Books to train on.", show_default="four in data/")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Held-out books.", show_default="two in data/")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Checkpoint to continue from.", show_default="trained here")
    ] = None,
    base_steps: Annotated[
        int, typer.Option(help="Training steps of the base, if it is trained here.")
    ] = 1200,
    train_length: Annotated[
        str | None, typer.Option(help="Length of a row in tokens.", show_default="that of the base")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps for each policy.")] = 300,
    seeds: Annotated[int, typer.Option(help="Runs for each policy.")] = 3,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies to run.", show_default="all")
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="Number of positions to evaluate.", show_default="64 × the training length"
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of that length from each book.")] = 4,
    output: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path(
        "runs/initial-states"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Trains and evaluates the models, and prints a table in Markdown."""
    kinds = policy or list(INITIAL_STATES)
    for kind in kinds:
        INITIAL_STATES[kind]  # refuses an unknown policy before the training begins
    if min(base_steps, steps, seeds, windows) < 1:
        raise UserError("base-steps, steps, seeds and windows must be at least 1: give larger")
    books_to_read = train or [Path(f"data/{book}.txt") for book in TRAIN]
    held_out = text or [Path(f"data/{book}.txt") for book in HELD_OUT]
    trained, reach = lengths(base, train_length, length)
    for path in (*books_to_read, *held_out):
        read_text(path)  # refuses a missing book before the training begins
    name = base or "bytes"
    tokenizer = load_tokenizer(name)
    task = books(books_to_read, tokenizer, name, output)
    if base is None:
        base = trained_base(output / "base", task, base_steps, trained, quiet)
    documents = held_out_documents(held_out, tokenizer, base, reach, windows)

    found = {"base": [evaluate(base, documents, reach, output / "loss/base.jsonl", quiet)]}
    for seed in range(seeds):  # outermost, so that an interrupted study has complete comparisons
        for kind in kinds:
            run = output / kind / f"seed{seed}"
            config = continued(base, run, task, kind, seed, trained, steps, name)
            Trainer(config, resume=True, quiet=quiet).train()
            rows = evaluate(str(run), documents, reach, output / f"loss/{kind}-{seed}.jsonl", quiet)
            found.setdefault(kind, []).append(rows)
    lines = table(found, trained, reach)
    write_atomic(output / "table.md", "\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def lengths(base: str | None, train_length: str | None, length: str | None) -> tuple[int, int]:
    """Returns the training length and the number of positions to evaluate.

    Raises:
        UserError: the training length is not known, or `length` is not well beyond it.
    """
    if base is None and train_length is None:
        trained = load_config(TrainConfig, CONFIG).length.max
    else:
        trained = required_training_length(base or "", train_length)
    reach = 64 * trained if length is None else parse_length(length)
    if reach < 2 * trained:
        raise UserError(
            f"forgetting shows beyond {format_length(trained)}: give --length "
            f"{format_length(2 * trained)} or more"
        )
    return trained, reach


def books(files: list[Path], tokenizer: Tokenizer, name: str, output: Path) -> dict[str, Any]:
    """Returns the task on a corpus of the books, which is built if it does not exist yet."""
    corpus = output / "corpus"
    if not corpus.exists():
        build_corpus(files, tokenizer, corpus, name=name, quiet=True)
    return {"kind": "text", "corpus": str(corpus), "max_segments": MAX_SEGMENTS}


def trained_base(run: Path, task: dict[str, Any], steps: int, trained: int, quiet: bool) -> str:
    """Trains the base, and returns its folder."""
    settings = [f"output_dir={run}", f"max_steps={steps}", f"length.max={trained}"]
    settings += [f"warmup_steps={steps // 2}"] if steps < 200 else []  # else as in the file
    config = load_config(TrainConfig, CONFIG, settings)
    config.task = task
    Trainer(config, resume=True, quiet=quiet).train()
    return str(run)


def continued(
    base: str,
    run: Path,
    task: dict[str, Any],
    kind: str,
    seed: int,
    trained: int,
    steps: int,
    tokenizer: str,
) -> TrainConfig:
    """Returns the training configuration of a run; only policy and seed differ between runs."""
    values = {
        "output_dir": str(run),
        "init_from": base,
        "tokenizer": tokenizer,
        "task": task,
        "initial_state": {"kind": kind},
        "seed": seed,
        "length": {"max": trained},
        "per_device_train_batch_size": max(1, STEP_TOKENS // trained),
        "max_steps": steps,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": steps // 15,
        "decay_steps": steps // 3,
        "weight_decay": 0.1,
        "save_steps": 100,
        "logging_steps": 50,
    }
    return build_config(TrainConfig, values)


def held_out_documents(
    paths: list[Path], tokenizer: Tokenizer, base: str, reach: int, windows: int
) -> list[Document]:
    """Returns the held-out books, each cut to at most `windows` windows."""
    books = read_documents(paths, tokenizer, load(base))
    return [book._replace(tokens=book.tokens[: windows * reach + 1]) for book in books]


def evaluate(
    checkpoint: str, documents: list[Document], reach: int, output: Path, quiet: bool
) -> list[Row]:
    """Evaluates the loss of one checkpoint by position."""
    return measure.evaluate(load(checkpoint), documents, length=reach, output=output, quiet=quiet)


def table(found: dict[str, list[list[Row]]], trained: int, reach: int) -> list[str]:
    """Returns a table of the mean loss in nats by position, one row per policy, and differences."""
    spans = list(pairwise([0, *(edge for edge in measure.edges(reach) if edge >= trained)]))
    head = [f"{format_length(a)} to {format_length(b)}" for a, b in spans]
    lines = [
        "| start | seeds | " + " | ".join(head) + " | largest beyond / inside |",
        "| --- " * (len(spans) + 3) + "|",
    ]
    losses = {
        kind: [[mean_loss(rows, a, b) for a, b in spans] for rows in runs]
        for kind, runs in found.items()
    }
    for kind, runs in losses.items():
        cells = [shown(mean(values)) for values in zip(*runs, strict=True)]
        ratios = []
        for rows in found[kind]:
            judged = forgetting(rows, trained)
            assert judged is not None  # reach is beyond the training length
            ratios.append(judged.beyond / judged.inside)
        lines.append(f"| {kind} | {len(runs)} | {' | '.join(cells)} | {shown(mean(ratios))} |")
    for kind, runs in losses.items():
        if kind not in ("base", "zero") and "zero" in losses:
            pairs = zip(runs, losses["zero"], strict=True)
            less = [[a - b for a, b in zip(one, zero, strict=True)] for one, zero in pairs]
            cells = [shown(mean(values)) for values in zip(*less, strict=True)]
            lines.append(f"| {kind} − zero | {len(runs)} | {' | '.join(cells)} | |")
    return lines


def mean_loss(rows: list[Row], start: int, stop: int) -> float:
    """Returns the mean loss at positions `start` up to `stop`, over documents."""
    buckets = [b for b in measure.summarise(rows)[1] if start <= b.start and b.stop <= stop]
    total = sum((b.stop - b.start) * b.nats.mean for b in buckets)
    return total / sum(b.stop - b.start for b in buckets)


def shown(estimate: Estimate) -> str:
    """Returns a mean as text, with its interval if there are several seeds."""
    if estimate.n == 1:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


if __name__ == "__main__":
    run_script(main, __doc__)
