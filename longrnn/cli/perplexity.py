"""`longrnn eval perplexity` for one model, and for several models that are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from longrnn.cli.options import warn_if_calibrated_on
from longrnn.cli.results_folders import models_name
from longrnn.errors import UserError
from longrnn.files import file_name, plain_name
from longrnn.processes import is_main
from longrnn.units import format_length, parse_length

if TYPE_CHECKING:
    from longrnn.evaluation.paired import Difference
    from longrnn.evaluation.texts import Document
    from longrnn.hf.opened import OpenCheckpoint
    from longrnn.inference.overlapping import Overlap


class PerplexityOptions(NamedTuple):
    """The options of the command that are the same for all models."""

    texts: Sequence[Path]
    length: int
    by_position: bool
    train_length: str | None
    batch_size: int
    quiet: bool
    overlap: Overlap | None = None
    newlines: bool = False

    def longest(self, length: int) -> int:
        """The most tokens that a model reads from an empty state, for a window of `length`."""
        return length if self.overlap is None else min(length, self.overlap.context)


def parse_overlap(context: str | None, stride: str | None) -> Overlap | None:
    """The overlapping windows of `--context` and `--stride`; None if neither is given.

    Raises:
        UserError: one of them is missing, or they do not fit each other.
    """
    from longrnn.inference.overlapping import Overlap

    if context is None and stride is None:
        return None
    if context is None or stride is None:
        raise UserError(
            "overlapping windows need their length and their distance: give both --context and "
            "--stride, or neither"
        )
    overlap = Overlap(parse_length(context), parse_length(stride))
    overlap.check()
    return overlap


def measure_one(
    variant: str, mitigation: str | None, device: str, options: PerplexityOptions, folder: Path
) -> list[Path]:
    """Evaluates one model, prints the result and returns the files that were written.

    Only the main process prints and writes; the others return no files.
    """
    from longrnn.diagnostics.plots import loss_by_position
    from longrnn.evaluation.perplexity import evaluate
    from longrnn.evaluation.tables import print_forgetting, print_overlap, print_perplexity
    from longrnn.hf.training_length import training_length
    from longrnn.inference.engine import refuse_long

    model, documents = _open(variant, mitigation, device, options)
    refuse_long(model.model, options.longest(options.length))
    trained = training_length(model.source, options.train_length)
    rows = evaluate(
        model.model,
        documents,
        length=options.length,
        output=folder / "results.jsonl",
        overlap=options.overlap,
        batch_size=options.batch_size,
        quiet=options.quiet,
    )
    if not is_main():
        return []
    print_perplexity(rows, options.by_position)
    print_overlap(options.overlap, rows)
    written = [folder / "results.jsonl"]
    if options.by_position:
        print_forgetting(rows, trained, model.model.vocab_size, options.overlap)
        written.append(_picture(options, folder))
        loss_by_position(rows, written[-1], trained)
    return written


def measure_all(
    variants: Sequence[str],
    mitigation: str | None,
    device: str,
    options: PerplexityOptions,
    folder: Path,
) -> list[Path]:
    """Does what `measure_one` does for several models, and compares each with the first one."""
    from longrnn.diagnostics.loss_curves import losses_by_position
    from longrnn.evaluation import paired
    from longrnn.evaluation.perplexity import evaluate_windows
    from longrnn.evaluation.tables import print_forgetting, print_overlap, print_paired
    from longrnn.evaluation.windows import read_alike, shared_windows
    from longrnn.hf.training_length import training_length
    from longrnn.inference.engine import refuse_long

    opened = [_open(variant, mitigation, device, options) for variant in variants]
    models, documents = [model for model, _ in opened], [texts for _, texts in opened]
    trained = [training_length(model.source, options.train_length) for model in models]
    windows = shared_windows(documents, options.length)
    for model, own in zip(models, windows, strict=True):
        refuse_long(model.model, options.longest(max(window.length for window in own)))
    if options.by_position and not read_alike(documents):
        raise UserError(
            "positions count tokens, and the tokenizers of these models differ: leave out "
            "--by-position, or measure the models one by one"
        )
    files = _files(models, folder)
    measured = [
        evaluate_windows(
            model.model,
            own,
            output=file,
            overlap=options.overlap,
            batch_size=options.batch_size,
            quiet=options.quiet,
        )
        for model, own, file in zip(models, windows, files, strict=True)
    ]
    if not is_main():
        return []
    differences = [paired.bits_per_byte(measured[0], rows) for rows in measured[1:]]
    positions = [
        paired.by_position(measured[0], rows) if options.by_position else []
        for rows in measured[1:]
    ]
    names = [model.name for model in models]
    print_paired(names, measured, differences, positions)
    print_overlap(options.overlap, measured[0])
    written = [*files, _write(folder, models, options, differences, positions)]
    if options.by_position:
        for model, rows, length in zip(models, measured, trained, strict=True):
            typer.echo(model.name)
            print_forgetting(rows, length, model.model.vocab_size, options.overlap)
        written.append(_picture(options, folder))
        losses_by_position(dict(zip(names, measured, strict=True)), written[-1], trained)
    return written


def _open(
    variant: str, mitigation: str | None, device: str, options: PerplexityOptions
) -> tuple[OpenCheckpoint, list[Document]]:
    """A model, and the texts tokenized for it."""
    from longrnn.evaluation.texts import newlines, read_documents
    from longrnn.hf.opened import open_checkpoint

    model = open_checkpoint(variant, mitigation, device=device)
    documents = read_documents(options.texts, model.tokenizer, model.model)
    if options.newlines:
        documents.append(newlines(model.tokenizer, options.length + 1))
    warn_if_calibrated_on(model.model, documents)
    return model, documents


def _picture(options: PerplexityOptions, folder: Path) -> Path:
    return folder / f"loss_by_position_{format_length(options.length)}.png"


def _files(models: Sequence[OpenCheckpoint], folder: Path) -> list[Path]:
    """One results file for each model; no two have the same name.

    A file that an earlier version of this program began, under a longer name, is continued.
    """
    names = _told_apart([models_name([model.name]) for model in models])
    earlier = _told_apart([_earlier_name(model.name) for model in models])
    files = []
    for old, new in zip(earlier, names, strict=True):
        begun = folder / f"{old}.jsonl"
        files.append(begun if begun.is_file() else folder / f"{new}.jsonl")
    return files


def _told_apart(names: Sequence[str]) -> list[str]:
    """The names, with a number after those that occur several times."""
    return [
        name if names.count(name) == 1 else f"{name}-{number}"
        for number, name in enumerate(names, 1)
    ]


def _earlier_name(model: str) -> str:
    """The name of a model's file in earlier versions."""
    from longrnn.hf.names import split_spec

    path, own = split_spec(model)
    return file_name("+".join(filter(None, (Path(path).resolve().name, own and plain_name(own)))))


def _write(
    folder: Path,
    models: Sequence[OpenCheckpoint],
    options: PerplexityOptions,
    differences: Sequence[Difference],
    positions: Sequence[Sequence[Difference]],
) -> Path:
    """Writes `paired.jsonl`: for each model but the first, one row in all and one per bucket."""
    from longrnn.evaluation.perplexity import edges
    from longrnn.files import write_atomic

    first, *others = models
    header = {
        "evaluation": "perplexity_paired",
        "models": {model.name: model.model.fingerprint() for model in models},
        "length": options.length,
        **(options.overlap._asdict() if options.overlap is not None else {}),
    }
    lines = [header]
    for model, whole, buckets in zip(others, differences, positions, strict=True):
        about = {"first": first.name, "second": model.name}
        lines.append({**about, "unit": "bits per byte", **_numbers(whole)})
        starts = edges(options.length)
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
