"""What `longrnn eval perplexity` does with one model, and with several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from longrnn.cli.options import (
    results_folder,
    training_length,
    warn_if_calibrated_on,
)
from longrnn.cli.tables import print_forgetting, print_paired, print_perplexity
from longrnn.errors import UserError
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.paired import Difference
    from longrnn.evaluation.texts import Document
    from longrnn.hf.opened import OpenCheckpoint
    from longrnn.results import Row


class Asked(NamedTuple):
    """The options of the command that are no choice of a model."""

    texts: Sequence[Path]
    length: int
    by_position: bool
    train_length: str | None
    batch_size: int
    quiet: bool


def measure_one(
    variant: str, mitigation: str | None, device: str, asked: Asked, folder: Path
) -> list[Path]:
    """Measures one model; prints what was found and returns the files."""
    from longrnn.evaluation.perplexity import evaluate
    from longrnn.inference.length_limit import refuse_long

    # Checked before a long measurement begins.
    model, documents = _open(variant, mitigation, device, asked)
    refuse_long(model.model, asked.length)
    trained = training_length(model.source, asked.train_length)
    rows = evaluate(
        model.model,
        documents,
        length=asked.length,
        output=folder / "results.jsonl",
        batch_size=asked.batch_size,
        quiet=asked.quiet,
    )
    print_perplexity(rows, asked.by_position)
    written = [folder / "results.jsonl"]
    if asked.by_position:
        written.append(_by_position(model, rows, trained, asked, folder, "loss_by_position"))
    return written


def measure_all(
    variants: Sequence[str], mitigation: str | None, device: str, asked: Asked, folder: Path
) -> list[Path]:
    """Measures models on the same bytes and compares each with the first one."""
    from longrnn.evaluation import paired
    from longrnn.evaluation.perplexity import evaluate_windows
    from longrnn.evaluation.windows import read_alike, shared_windows
    from longrnn.inference.length_limit import refuse_long

    opened = [_open(variant, mitigation, device, asked) for variant in variants]
    models, documents = [model for model, _ in opened], [texts for _, texts in opened]
    trained = [training_length(model.source, asked.train_length) for model in models]
    windows = shared_windows(documents, asked.length)
    for model, wanted in zip(models, windows, strict=True):
        refuse_long(model.model, max(window.length for window in wanted))
    if asked.by_position and not read_alike(documents):
        raise UserError(
            "positions count tokens, and the tokenizers of these models differ: leave out "
            "--by-position, or measure the models one by one"
        )
    files = _files(models, folder)
    measured = [
        evaluate_windows(
            model.model, wanted, output=file, batch_size=asked.batch_size, quiet=asked.quiet
        )
        for model, wanted, file in zip(models, windows, files, strict=True)
    ]
    differences = [paired.bits_per_byte(measured[0], rows) for rows in measured[1:]]
    positions = [
        paired.by_position(measured[0], rows) if asked.by_position else [] for rows in measured[1:]
    ]
    names = [model.name for model in models]
    print_paired(names, measured, differences, positions)
    written = [*files, _write(folder, models, asked.length, differences, positions)]
    if asked.by_position:
        for model, rows, length, file in zip(models, measured, trained, files, strict=True):
            typer.echo(model.name)
            prefix = f"{file.stem}_loss_by_position"
            written.append(_by_position(model, rows, length, asked, folder, prefix))
    return written


def _open(
    variant: str, mitigation: str | None, device: str, asked: Asked
) -> tuple[OpenCheckpoint, list[Document]]:
    """A model, and the texts as it reads them."""
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.opened import open_checkpoint

    model = open_checkpoint(variant, mitigation, device=device)
    documents = read_documents(asked.texts, model.tokenizer, model.model)
    warn_if_calibrated_on(model.model, documents)
    return model, documents


def _by_position(
    model: OpenCheckpoint,
    rows: list[Row],
    trained: int | None,
    asked: Asked,
    folder: Path,
    prefix: str,
) -> Path:
    """Prints the verdict and draws the picture of one model."""
    from longrnn.diagnostics.plots import loss_by_position

    print_forgetting(rows, trained, model.model.vocab_size)
    picture = folder / f"{prefix}_{format_length(asked.length)}.png"
    loss_by_position(rows, picture, trained)
    return picture


def _files(models: Sequence[OpenCheckpoint], folder: Path) -> list[Path]:
    """A results file for each model, of different names."""
    names = [results_folder("perplexity", [model.name]).name for model in models]
    return [
        folder / f"{name if names.count(name) == 1 else f'{name}-{number}'}.jsonl"
        for number, name in enumerate(names, 1)
    ]


def _write(
    folder: Path,
    models: Sequence[OpenCheckpoint],
    length: int,
    differences: Sequence[Difference],
    positions: Sequence[Sequence[Difference]],
) -> Path:
    """`paired.jsonl`: a row for each model but the first, and one for each of its buckets."""
    from longrnn.evaluation.perplexity import edges
    from longrnn.files import write_atomic

    first, *others = models
    header = {
        "evaluation": "perplexity_paired",
        "models": {model.name: model.model.fingerprint() for model in models},
        "length": length,
    }
    lines = [header]
    for model, whole, buckets in zip(others, differences, positions, strict=True):
        about = {"first": first.name, "second": model.name}
        lines.append({**about, "unit": "bits per byte", **_numbers(whole)})
        starts = edges(length)
        lines += [
            {**about, "unit": "nats per token", "start": a, "stop": b, **_numbers(bucket)}
            for a, b, bucket in zip(starts, starts[1:], buckets, strict=False)
        ]
    write_atomic(folder / "paired.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return folder / "paired.jsonl"


def _numbers(difference: Difference) -> dict[str, object]:
    estimate, known = difference.estimate, difference.unit != "none"
    return {
        "mean_first": difference.first,
        "mean_second": difference.second,
        "difference": estimate.mean,
        "low": estimate.low if known else None,
        "high": estimate.high if known else None,
        "drawn": difference.unit,
        "n": estimate.n,
    }
