"""Train families of small models, and relate the size of the state to forgetting and recall.

    python scripts/study_capacity.py forget
    python scripts/study_capacity.py recall

`forget` trains byte-level language models with slow decays (`configs/train/capacity_forget.yaml`),
which collapse beyond their training length unless that length teaches them to forget. Every model
is trained from scratch, with the same number of steps and of tokens per step at every training
length, and then reads long windows of books that training did not see. The shortest training length
with which a state size forgets robustly is found by bisection, which takes it that every longer one
does too (`--all-lengths` trains them all).

`recall` trains on passkeys (`configs/train/capacity.yaml`). Models this small do not learn the task
from scratch at every length, so each state size learns it once at the shortest length, and every
longer length continues from this start with the same number of steps and tokens.

`longrnn diagnose capacity` combines what was recorded. The same command resumes an interrupted
study. Seeds come first, so that an interrupted study has complete families.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from longrnn.evaluation.passkey_grid import Grid
from longrnn.studies.capacity import LEAST_SIZES
from longrnn.studies.capacity_report import report

from longrnn import load, load_tokenizer
from longrnn.config import load_config
from longrnn.errors import UserError
from longrnn.evaluation import passkey, perplexity
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.texts import read_documents
from longrnn.files import write_atomic
from longrnn.hf.opened import OpenCheckpoint
from longrnn.programs import new_app, run_script
from longrnn.training.config import TrainConfig
from longrnn.training.trainer import Trainer
from longrnn.units import parse_length, parse_lengths

CONFIGS = Path(__file__).parents[1] / "configs/train"
BOOKS = ["data/moby_dick.txt", "data/tom_sawyer.txt"]
PROMPTS = "256,384,512,768,1k,1536,2k,3k,4k,6k,8k,12k,16k,24k,32k"
# Tokens per optimizer step, at every training length: a multiple of all lengths below.
STEP_TOKENS = {"forget": 1536, "recall": 6144}

app = new_app()
DStates = Annotated[str, typer.Option(help="State sizes, as mixer.d_state.")]
Trainings = Annotated[str, typer.Option(help="Training lengths.")]
Seeds = Annotated[int, typer.Option(help="Models of each state size and training length.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


@app.command()
def forget(
    d_states: DStates = "2,6,16,48,128",
    train_lengths: Trainings = "64,96,128,192,256,384,512,768",
    all_lengths: Annotated[
        bool, typer.Option("--all-lengths", help="Train at every length, without bisection.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Training steps of every model.")] = 250,
    seeds: Seeds = 2,
    text: Annotated[
        list[str], typer.Option(help="A book that training does not see; repeatable.")
    ] = BOOKS,
    length: Annotated[str, typer.Option(help="Tokens of an evaluation window.")] = "16k",
    windows: Annotated[int, typer.Option(help="Windows of each book.")] = 4,
    files: Annotated[
        list[str] | None,
        typer.Option(help="A training text; repeatable.", show_default="as in the configuration"),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path(
        "runs/capacity-forget"
    ),
    quiet: Quiet = False,
) -> None:
    """Measures the training length from which on models of each state size forget robustly."""
    check(steps, seeds, windows)
    sizes, reach = family(d_states), parse_length(length)
    trainings = equal_tokens("forget", train_lengths)
    if reach <= trainings[-1]:
        raise UserError(
            f"windows of {reach} tokens do not go beyond the longest training length: give a "
            "longer --length"
        )
    heads = [head(Path(book), reach * windows + 1, output) for book in text]

    def robust(trained: int, d_state: int, seed: int) -> bool:
        """Trains one model and returns whether it forgets robustly."""
        run = output / "runs" / f"state{d_state}-length{trained}-seed{seed}"
        settings = common("forget", run, d_state, trained, seed, steps)
        train("capacity_forget.yaml", settings | listed(files), quiet)
        model, tokenizer = load(run), load_tokenizer(run)
        rows = perplexity.evaluate(
            model,
            read_documents(heads, tokenizer, model),
            length=reach,
            output=output / "results" / run.name / "perplexity.jsonl",
            quiet=quiet,
        )
        judged = forgetting(rows, trained)
        assert judged is not None  # `reach` is greater than every training length
        return judged.robust

    for seed in range(seeds):
        for d_state in sizes:
            model_at = partial(robust, d_state=d_state, seed=seed)
            if all_lengths:
                for trained in trainings:
                    model_at(trained)
            else:
                bisect_left(trainings, True, key=model_at)
    finish(output)


@app.command()
def recall(
    d_states: DStates = "4,12,32,96,256",
    train_lengths: Trainings = "192,384,768,1536",
    steps: Annotated[int, typer.Option(help="Steps of the start, at the shortest length.")] = 1000,
    more_steps: Annotated[int, typer.Option(help="Steps of every model after the start.")] = 300,
    seeds: Seeds = 2,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = PROMPTS,
    n: Annotated[
        int, typer.Option("--n", help="Prompts for each length and each of three depths.")
    ] = 20,
    output: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path(
        "runs/capacity-recall"
    ),
    quiet: Quiet = False,
) -> None:
    """Measures the longest passkey prompt that models of each state size recall."""
    check(steps, more_steps, seeds, n)
    sizes, trainings = family(d_states), equal_tokens("recall", train_lengths)
    prompts = Grid(parse_lengths(lengths), n, passkey.evenly_spaced(3))
    for seed in range(seeds):
        for d_state in sizes:
            start = output / "starts" / f"state{d_state}-seed{seed}"
            settings = common("recall", start, d_state, trainings[0], seed, steps)
            train("capacity.yaml", settings, quiet)
            for trained in trainings:
                run = output / "runs" / f"state{d_state}-length{trained}-seed{seed}"
                settings = common("recall", run, d_state, trained, seed, more_steps)
                train("capacity.yaml", settings | {"init_from": start}, quiet)
                passkey.evaluate(
                    [OpenCheckpoint(run.name, load(run), load_tokenizer(run))],
                    prompts,
                    output=output / "results" / run.name / "passkey.jsonl",
                    quiet=quiet,
                )
    finish(output)


def check(*numbers: int) -> None:
    """Refuses a number of steps, seeds, windows or prompts below 1."""
    if min(numbers) < 1:
        raise UserError("steps, seeds, windows and n must be at least 1: give positive numbers")


def family(d_states: str) -> list[int]:
    """Returns the state sizes, ascending.

    Raises:
        UserError: there are too few for a fit.
    """
    sizes = sorted(set(parse_lengths(d_states)))
    if len(sizes) < LEAST_SIZES:
        raise UserError(
            f"--d-states {d_states} has {len(sizes)} different sizes and a fit needs "
            f"{LEAST_SIZES}: give more"
        )
    return sizes


def equal_tokens(part: str, lengths: str) -> list[int]:
    """Returns training lengths, ascending, that all have the same tokens per step.

    Raises:
        UserError: a length does not divide the tokens of a step.
    """
    trainings, tokens = sorted(parse_lengths(lengths)), STEP_TOKENS[part]
    for trained in trainings:
        if tokens % trained:
            raise UserError(
                f"rows of {trained} tokens do not divide a step of {tokens:,} tokens, and all "
                "training lengths must have equal tokens: give divisors of it"
            )
    return trainings


def common(
    part: str, run: Path, d_state: int, trained: int, seed: int, steps: int
) -> dict[str, Any]:
    """Returns the settings of a run that differ from its configuration."""
    return {
        "output_dir": run,
        "model.mixer.d_state": d_state,
        "length.max": trained,
        "per_device_train_batch_size": STEP_TOKENS[part] // trained,
        "seed": seed,
        "max_steps": steps,
        "warmup_steps": max(1, steps // 8),
        "save_steps": steps,
    }


def listed(files: Sequence[str] | None) -> dict[str, Any]:
    return {} if files is None else {"task.files": f"[{','.join(files)}]"}


def train(config: str, settings: dict[str, Any], quiet: bool) -> None:
    """Trains a run to its end, or does nothing if it is already there."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    loaded = load_config(TrainConfig, CONFIGS / config, overrides)
    Trainer(loaded, resume=True, quiet=quiet).train()


def head(book: Path, n_bytes: int, output: Path) -> Path:
    """Writes the first bytes of a book to the study's folder, and returns the file.

    Raises:
        UserError: the book does not exist or is too short.
    """
    if not book.is_file():
        raise UserError(f"no text at {book}: save the book there, or give another --text")
    content = book.read_bytes()
    if len(content) < n_bytes:
        raise UserError(
            f"{book} has {len(content):,} bytes and the windows need {n_bytes:,}: give a longer "
            "text, or fewer or shorter windows"
        )
    path = output / "texts" / book.name
    # A character at the cut may have up to four bytes; a partial one at the end is dropped.
    write_atomic(path, content[: n_bytes + 4].decode("utf-8", errors="ignore"))
    return path


def finish(output: Path) -> None:
    """Prints and writes the capacity of all models that the folder has results of."""
    family = [str(output / "runs" / one.name) for one in sorted((output / "results").iterdir())]
    typer.echo("\n".join(map(str, report(family, [output / "results"], output / "capacity"))))


if __name__ == "__main__":
    run_script(app, __doc__)
