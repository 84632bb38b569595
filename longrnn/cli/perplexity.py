"""What `longrnn eval perplexity` does with one model, and with several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from longrnn.cli.options import (
    load_variant,
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
    from longrnn.models import LanguageModel
    from longrnn.results import Row


class Asked(NamedTuple):
    """The options of the command that are no choice of a model."""

    texts: Sequence[Path]
    length: int
    by_position: bool
    train_length: str | None
    batch_size: int
    quiet: bool


class Reader(NamedTuple):
    """One model with the texts as it reads them."""

    name: str
    checkpoint: str
    model: LanguageModel
    documents: list[Document]


def measure_one(
    variant: str, mitigation: str | None, device: str, asked: Asked, folder: Path
) -> list[Path]:
    """Measures one model; prints what was found and returns the files."""
    from longrnn.evaluation.perplexity import evaluate

    # Checked before a long measurement begins.
    reader = _reader(variant, mitigation, device, asked)
    trained = training_length(reader.checkpoint, asked.train_length)
    rows = evaluate(
        reader.model,
        reader.documents,
        length=asked.length,
        output=folder / "results.jsonl",
        batch_size=asked.batch_size,
        quiet=asked.quiet,
    )
    print_perplexity(rows, asked.by_position)
    written = [folder / "results.jsonl"]
    if asked.by_position:
        written.append(_by_position(reader, rows, trained, asked, folder, "loss_by_position"))
    return written


def measure_all(
    variants: Sequence[str], mitigation: str | None, device: str, asked: Asked, folder: Path
) -> list[Path]:
    """Measures models on the same bytes and compares each with the first one."""
    from longrnn.evaluation import paired
    from longrnn.evaluation.perplexity import evaluate_windows
    from longrnn.evaluation.windows import read_alike, shared_windows

    readers = [_reader(variant, mitigation, device, asked) for variant in variants]
    trained = [training_length(reader.checkpoint, asked.train_length) for reader in readers]
    documents = [reader.documents for reader in readers]
    windows = shared_windows(documents, asked.length)
    if asked.by_position and not read_alike(documents):
        raise UserError(
            "positions count tokens, and the tokenizers of these models differ: leave out "
            "--by-position, or measure the models one by one"
        )
    files = _files(readers, folder)
    measured = [
        evaluate_windows(
            reader.model, wanted, output=file, batch_size=asked.batch_size, quiet=asked.quiet
        )
        for reader, wanted, file in zip(readers, windows, files, strict=True)
    ]
    differences = [paired.bits_per_byte(measured[0], rows) for rows in measured[1:]]
    positions = [
        paired.by_position(measured[0], rows) if asked.by_position else [] for rows in measured[1:]
    ]
    names = [reader.name for reader in readers]
    print_paired(names, measured, differences, positions)
    written = [*files, _write(folder, readers, asked.length, differences, positions)]
    if asked.by_position:
        for reader, rows, length, file in zip(readers, measured, trained, files, strict=True):
            typer.echo(reader.name)
            prefix = f"{file.stem}_loss_by_position"
            written.append(_by_position(reader, rows, length, asked, folder, prefix))
    return written


def _reader(variant: str, mitigation: str | None, device: str, asked: Asked) -> Reader:
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.tokenizer import load_tokenizer
    from longrnn.inference.reach import refuse_long

    checkpoint, model = load_variant(variant, mitigation, device)
    refuse_long(model, asked.length)
    documents = read_documents(asked.texts, load_tokenizer(checkpoint), model)
    warn_if_calibrated_on(model, documents)
    name = variant if mitigation is None else f"{variant}+{mitigation}"
    return Reader(name, checkpoint, model, documents)


def _by_position(
    reader: Reader, rows: list[Row], trained: int | None, asked: Asked, folder: Path, prefix: str
) -> Path:
    """Prints the verdict and draws the picture of one model."""
    from longrnn.diagnostics.plots import loss_by_position

    print_forgetting(rows, trained, reader.model.vocab_size)
    picture = folder / f"{prefix}_{format_length(asked.length)}.png"
    loss_by_position(rows, picture, trained)
    return picture


def _files(readers: Sequence[Reader], folder: Path) -> list[Path]:
    """A results file for each model, of different names."""
    names = [results_folder("perplexity", [reader.name]).name for reader in readers]
    return [
        folder / f"{name if names.count(name) == 1 else f'{name}-{number}'}.jsonl"
        for number, name in enumerate(names, 1)
    ]


def _write(
    folder: Path,
    readers: Sequence[Reader],
    length: int,
    differences: Sequence[Difference],
    positions: Sequence[Sequence[Difference]],
) -> Path:
    """`paired.jsonl`: a row for each model but the first, and one for each of its buckets."""
    from longrnn.evaluation.perplexity import edges
    from longrnn.files import write_atomic

    first, *others = readers
    header = {
        "evaluation": "perplexity_paired",
        "models": {reader.name: reader.model.fingerprint() for reader in readers},
        "length": length,
    }
    lines = [header]
    for reader, whole, buckets in zip(others, differences, positions, strict=True):
        about = {"first": first.name, "second": reader.name}
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
