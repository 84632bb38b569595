"""Comparison of models: suites of evaluations, with paired differences between the models.

Notable choices:
- Every evaluation has a results file for each model, so that models, lengths and samples can be
  added without measuring anything twice.
- The first model is the reference, with which every other model is compared on the same items.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from longrnn import processes
from longrnn.comparison.suites import Evaluation, Measurement, Suite
from longrnn.comparison.suites.base import CELLS, RECORD, settings
from longrnn.errors import UserError
from longrnn.evaluation.task_code import refuse_task_code
from longrnn.files import file_name, write_atomic
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import Estimate
from longrnn.text import read_mapping
from longrnn.units import format_length


class Cell(NamedTuple):
    """One metric of one model at one length.

    Attributes:
        suite: name of the suite.
        metric: name of the column.
        model: name of the row.
        at: length in tokens; None for a metric without lengths.
        estimate: the result; None if it could not be measured.
        difference: from the reference, on the items that both have; None for the reference, and for
            metrics without samples.
        reason: why there is no estimate.
        form: format specification of values.
    """

    suite: str
    metric: str
    model: str
    at: int | None
    estimate: Estimate | None
    difference: Estimate | None
    reason: str | None
    form: str

    def __str__(self) -> str:
        if self.estimate is None:
            return self.reason or "–"
        return shown(self.estimate, self.form)

    def below(self) -> str:
        """Return the difference from the reference as text; empty if there is none."""
        return "" if self.difference is None else shown(self.difference, self.form, "+")


class Table(NamedTuple):
    """The cells of a suite: one row per length and model, one column per metric."""

    suite: str
    metrics: list[str]
    rows: list[tuple[int | None, str, list[Cell | None]]]


def compare(
    models: Sequence[OpenCheckpoint],
    suites: Sequence[Suite],
    *,
    output: Path,
    trust_task_code: bool = False,
    quiet: bool = False,
) -> list[Cell]:
    """Measure every model with every suite.

    Everything that can be checked is checked before the first measurement.

    Args:
        models: models with different names; the first is the reference.
        suites: suites with different names.
        output: a folder. `SUITE/EVALUATION/MODEL.jsonl` is resumed, and `comparison.jsonl` has all
            cells at the end.
        trust_task_code: whether suites may run Python code in their own task files.
        quiet: show no progress.

    Raises:
        UserError: duplicate names, a tokenizer that does not fit, code that is not trusted,
            settings that an evaluation refuses, logits that are not finite, or results of another
            suite or model in `output`.
    """
    _refuse_doubles([suite.name for suite in suites], "suites")
    _refuse_doubles([model.name for model in models], "models")
    for model in models:
        model.refuse_unfit()
    evaluations = [evaluation for suite in suites for evaluation in suite.evaluations]
    if not trust_task_code:
        refuse_task_code(path for one in evaluations for path in one.task_code())
    for evaluation in evaluations:
        evaluation.prepare(models)
    records = processes.on_main(lambda: [_record(output / suite.name, suite) for suite in suites])
    cells = []
    for suite, record in zip(suites, records, strict=True):
        if processes.is_main():
            write_atomic(output / suite.name / RECORD, record)
        for evaluation in suite.evaluations:
            folder = output / suite.name / file_name(evaluation.title)
            cells += _cells(suite.name, evaluation, models, folder, quiet)
    lines = [json.dumps(_plain(cell)) + "\n" for cell in cells]
    if processes.is_main():
        write_atomic(output / CELLS, "".join(lines))
    return cells


def tables(cells: Sequence[Cell]) -> list[Table]:
    """Return one table per suite: lengths ascending, models and metrics in order of appearance."""
    found = []
    for suite in dict.fromkeys(cell.suite for cell in cells):
        own = {(c.at, c.model, c.metric): c for c in cells if c.suite == suite}
        metrics = list(dict.fromkeys(metric for _, _, metric in own))
        models = list(dict.fromkeys(model for _, model, _ in own))
        lengths = sorted({at for at, _, _ in own}, key=lambda at: -1 if at is None else at)
        rows = [
            (at, model, _once([own.get((at, model, metric)) for metric in metrics]))
            for at in lengths
            for model in models
        ]
        found.append(Table(suite, metrics, rows))
    return found


def _once(cells: list[Cell | None]) -> list[Cell | None]:
    """Replace a reason by "likewise" if the cell to the left has the same."""
    return [
        cell._replace(reason="likewise")
        if cell and left and cell.reason and cell.reason == left.reason
        else cell
        for left, cell in zip([None, *cells[:-1]], cells, strict=True)
    ]


def markdown(table: Table) -> list[str]:
    """Return the lines of a table in Markdown, with differences below their values."""
    head = ["length", "model", *table.metrics]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for at, model, cells in table.rows:
        texts = ["–" if at is None else format_length(at), model]
        texts += ["<br>".join(filter(None, (str(c), c.below()))) if c else "–" for c in cells]
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def shown(estimate: Estimate, form: str, sign: str = "") -> str:
    """Format a value with its interval, if it has one."""
    mean, low, high = (format(value, f"{sign}z{form}").replace("-", "−") for value in estimate[:3])
    if estimate.n == 1 or not math.isfinite(estimate.high - estimate.low):
        return mean
    return f"{mean} [{low}, {high}]"


def _cells(
    suite: str, evaluation: Evaluation, models: Sequence[OpenCheckpoint], folder: Path, quiet: bool
) -> Iterator[Cell]:
    """Measure one evaluation and yield its cells, model by model."""
    reference: dict[tuple[str, int | None], Measurement] = {}
    for model in models:
        path = folder / f"{file_name(model.name)}.jsonl"
        for measurement in evaluation.measure(model, path, quiet=quiet):
            metric, at, samples, reason = measurement
            difference = None
            if model is models[0]:
                reference[metric.name, at] = measurement
            elif metric.difference is not None and (metric.name, at) in reference:
                others = reference[metric.name, at].samples
                shared = [key for key in samples if key in others]
                pairs = [samples[key] for key in shared], [others[key] for key in shared]
                difference = metric.difference(*pairs) if shared else None
            estimate = metric.estimate(list(samples.values())) if samples else None
            yield Cell(
                suite, metric.name, model.name, at, estimate, difference, reason, metric.form
            )


def _record(folder: Path, suite: Suite) -> str:
    """Return the identity of a folder's suite as YAML, with earlier evaluations included.

    Raises:
        UserError: the folder has the results of another suite with the same name.
    """
    path = folder / RECORD
    if not path.is_file():
        return yaml.safe_dump(suite.identity, sort_keys=False)
    remedy = "choose another output"
    before = read_mapping(path, remedy)
    recorded = before.get("evaluations")
    whole = isinstance(recorded, dict) and all(isinstance(one, dict) for one in recorded.values())
    if before.keys() != suite.identity.keys() or not whole:
        raise UserError(f"{path} is damaged: {remedy}")
    # Adding or removing an evaluation does not affect the results of the others.
    known = {name: settings(options) for name, options in before["evaluations"].items()}
    requested = suite.identity["evaluations"]
    differ = [name for name in requested if name in known and known[name] != requested[name]]
    if before["seed"] != suite.identity["seed"]:
        differ.append("seed")
    if differ:
        raise UserError(
            f"{folder} holds the results of another suite (different {', '.join(differ)}): choose "
            "another output"
        )
    return yaml.safe_dump({**suite.identity, "evaluations": known | requested}, sort_keys=False)


def _refuse_doubles(names: Sequence[str], what: str) -> None:
    double = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if double:
        raise UserError(f"two {what} are called {double[0]!r}: give each once, under its own name")


def _plain(cell: Cell) -> dict[str, Any]:
    """Return a cell for JSON; bounds that are not finite become None."""
    row = cell._asdict()
    for name in ("estimate", "difference"):
        if (estimate := row[name]) is not None:
            row[name] = {
                key: value if math.isfinite(value) else None
                for key, value in estimate._asdict().items()
            }
    del row["form"]
    return row
