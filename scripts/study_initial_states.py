"""Compare policies for the initial state of a row, at equal budget, by the loss on books.

    python scripts/study_initial_states.py
    python scripts/study_initial_states.py --base runs/books-collapse --train-length 128
    python scripts/study_initial_states.py --base collapse-tiny --length 64k --steps 500 \\
        --step-tokens 2k --max-segments 1024 --row-lengths 256,1k --output runs/cure

One model, the base, is trained on books from zero states (`configs/train/books_256.yaml`, or
`--base`). Training then continues with each policy and seed on the same books, with the same
numbers of steps and tokens, and with `--row-lengths` also from zero states on longer rows; the
others are compared with `zero`. All models are evaluated on held-out books, at positions up to 64
times the training length, and in windows of the training length. Intervals are over the seeds of
the continued training; the base has one seed, so they hold for this base only. The same command
resumes an interrupted study and skips finished runs.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from longrnn.training.documents import build_corpus

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
from longrnn.studies.loss_inside import Losses, beginnings, evaluate
from longrnn.text import Tokenizer, read_text
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.trainer import Trainer
from longrnn.units import format_length, parse_length, parse_lengths

CONFIG = Path(__file__).parents[1] / "configs/train/books_256.yaml"
TRAIN = ("war_and_peace", "les_miserables", "karamazov_brothers", "don_quixote")
HELD_OUT = ("moby_dick", "tom_sawyer")


class Start(NamedTuple):
    """What differs between the runs of one seed: the initial state, and the length of a row."""

    initial_state: dict[str, Any]
    row_length: int


class Budget(NamedTuple):
    """The steps and tokens of every run."""

    steps: int
    step_tokens: int


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
    step_tokens: Annotated[
        str, typer.Option(help="Tokens of one step, at every length of a row.")
    ] = "4k",
    max_segments: Annotated[
        int, typer.Option(help="Segments after which a carried state starts another document.")
    ] = 64,
    seeds: Annotated[int, typer.Option(help="Runs for each policy.")] = 3,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy to run; carry-0.1 starts 0.1 of the rows from zero.", show_default="all"
        ),
    ] = None,
    row_lengths: Annotated[
        str | None,
        typer.Option(
            help="Also train with zero states on rows of these lengths.", show_default="none"
        ),
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
    # Bad input is refused before the training begins.
    policies = {name: initial_state(name) for name in policy or INITIAL_STATES}
    if min(base_steps, steps, seeds, windows, max_segments) < 1:
        raise UserError(
            "base-steps, steps, seeds, windows and max-segments must be at least 1: give larger"
        )
    books_to_read = train or [Path(f"data/{book}.txt") for book in TRAIN]
    held_out = text or [Path(f"data/{book}.txt") for book in HELD_OUT]
    trained, reach = lengths(base, train_length, length)
    budget = Budget(steps, parse_length(step_tokens))
    starts = variants(policies, parse_lengths(row_lengths) if row_lengths else [], trained, budget)
    for path in (*books_to_read, *held_out):
        read_text(path)  # refuses a missing book before the training begins
    name = base or "bytes"
    tokenizer = load_tokenizer(name)
    task = {**books(books_to_read, tokenizer, name, output), "max_segments": max_segments}
    if base is None:
        base = trained_base(output / "base", task, base_steps, trained, quiet)
    documents = held_out_documents(held_out, tokenizer, base, reach, windows)

    def measured(checkpoint: str, file: str) -> Losses:
        return evaluate(
            load(checkpoint),
            documents,
            train_length=trained,
            length=reach,
            output=output / "loss" / f"{file}.jsonl",
            quiet=quiet,
        )

    found = {"base": [measured(base, "base")]}
    for seed in range(seeds):  # outermost, so that an interrupted study has complete comparisons
        for kind, start in starts.items():
            run = output / kind / f"seed{seed}"
            config = continued(base, run, task, start, seed, budget, name)
            Trainer(config, resume=True, quiet=quiet).train()
            found.setdefault(kind, []).append(measured(str(run), f"{kind}-{seed}"))
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


def initial_state(name: str) -> dict[str, Any]:
    """Returns the setting of a policy, `NAME` or `NAME-SHARE` with the share of zero starts.

    Raises:
        UserError: the policy is unknown, or the share is not a number.
    """
    kind, dash, share = name.partition("-")
    INITIAL_STATES[kind]  # refuses an unknown one
    if not dash:
        return {"kind": kind}
    try:
        return {"kind": kind, "zero_share": float(share)}
    except ValueError:
        raise UserError(
            f"{share!r} is not a share of zero starts: write for example {kind}-0.1"
        ) from None


def variants(
    policies: dict[str, dict[str, Any]], row_lengths: list[int], trained: int, budget: Budget
) -> dict[str, Start]:
    """Returns what to train, by name: every policy, and zero states on longer rows.

    Raises:
        UserError: a row does not fit into the tokens of a step.
    """
    found = {name: Start(state, trained) for name, state in policies.items()}
    found |= {f"zero-{format_length(one)}": Start({"kind": "zero"}, one) for one in row_lengths}
    for start in found.values():
        if budget.step_tokens % start.row_length:
            raise UserError(
                f"{budget.step_tokens} tokens of a step are not a whole number of rows of "
                f"{start.row_length}: choose --step-tokens and --row-lengths that divide"
            )
    return found


def books(files: list[Path], tokenizer: Tokenizer, name: str, output: Path) -> dict[str, Any]:
    """Returns the task on a corpus of the books, which is built if it does not exist yet."""
    corpus = output / "corpus"
    if not corpus.exists():
        build_corpus(files, tokenizer, corpus, name=name, quiet=True)
    return {"kind": "text", "corpus": str(corpus)}


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
    start: Start,
    seed: int,
    budget: Budget,
    tokenizer: str,
) -> TrainConfig:
    """Returns the training configuration of a run; only `start` and seed differ between runs."""
    steps = budget.steps
    values = {
        "output_dir": str(run),
        "init_from": base,
        "tokenizer": tokenizer,
        "task": task,
        "initial_state": start.initial_state,
        "seed": seed,
        "length": {"max": start.row_length},
        "per_device_train_batch_size": budget.step_tokens // start.row_length,
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
    return beginnings(read_documents(paths, tokenizer, load(base)), windows * reach)


def table(found: dict[str, list[Losses]], trained: int, reach: int) -> list[str]:
    """Returns a table of the mean loss in nats by position, one row per run, and differences."""
    spans = list(pairwise([0, *(edge for edge in measure.edges(reach) if edge >= trained)]))
    head = [f"{format_length(a)} to {format_length(b)}" for a, b in spans]
    lines = [
        f"| start | seeds | windows of {format_length(trained)} | {' | '.join(head)} "
        "| largest beyond / inside |",
        "| --- " * (len(spans) + 4) + "|",
    ]
    losses = {
        kind: [
            [measure.summarise(run.inside)[0].nats.mean]
            + [mean_loss(run.long, a, b) for a, b in spans]
            for run in runs
        ]
        for kind, runs in found.items()
    }
    for kind, runs in losses.items():
        cells = [shown(mean(values)) for values in zip(*runs, strict=True)]
        ratios = []
        for run in found[kind]:
            judged = forgetting(run.long, trained)
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
