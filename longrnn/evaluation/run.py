"""Runs evaluations: measures what the store lacks, and computes the cells of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longrnn import processes
from longrnn.errors import UserError
from longrnn.evaluation.base import Cell, Column, Evaluation, Found, Item, Plan
from longrnn.hf.opened import OpenCheckpoint, open_checkpoint
from longrnn.progress import Progress
from longrnn.results import Origin, Store


class Outcome(NamedTuple):
    """The result of one evaluation.

    Attributes:
        evaluation: what was measured.
        models: of which models; the others are compared with the first one.
        found: the results of all items by the name of the model.
        cells: of the table.
    """

    evaluation: Evaluation
    models: Sequence[OpenCheckpoint]
    found: dict[str, Found]
    cells: list[Cell]

    def notes(self) -> list[str]:
        """Return the sentences under the table."""
        return self.evaluation.notes(self.found)


def run(
    models: Sequence[OpenCheckpoint],
    evaluations: Sequence[Evaluation],
    folder: Path,
    *,
    quiet: bool = False,
) -> list[Outcome]:
    """Measure every model with every evaluation; results that the folder has are not repeated.

    Everything that can be checked is checked before the first measurement.

    Args:
        models: models with different names.
        evaluations: with different titles.
        folder: of the store; created if missing.
        quiet: show no progress.

    Raises:
        UserError: no model or no evaluation, duplicate names, options that an evaluation refuses,
            or logits that are not finite.
    """
    if not models or not evaluations:
        raise UserError("there is nothing to measure: give at least one model and one evaluation")
    for names in [one.title for one in evaluations], [model.name for model in models]:
        if double := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{double[0]!r} is the name of two: give each its own name")
    plans = [evaluation.plan(models) for evaluation in evaluations]
    if not any(plan.items for own in plans for plan in own):
        raise UserError(next(why for own in plans for plan in own for why in plan.reasons.values()))
    store = Store(folder)
    outcomes = []
    for evaluation, own in zip(evaluations, plans, strict=True):
        found = {
            model.name: _measured(evaluation, model, plan.items, store, quiet)
            for model, plan in zip(models, own, strict=True)
        }
        cells = list(_cells(evaluation, models, own, found)) if processes.is_main() else []
        outcomes.append(Outcome(evaluation, models, found, cells))
    return outcomes


def _measured(
    evaluation: Evaluation, model: OpenCheckpoint, items: list[Item], store: Store, quiet: bool
) -> Found:
    """Measure the missing items of one model, and return the results of all items."""
    prints = model.model.fingerprint(), model.tokenizer.fingerprint()
    origin = Origin(evaluation.kind, *prints, evaluation.protocol(model))
    # An item may be given twice, such as a text.
    distinct = {origin.key(item.key): item for item in items}.values()
    todo = [item for item in distinct if store.get(origin, item.key) is None]
    if not evaluation.alone:
        todo = processes.share(todo, lambda item: item.group[:1], lambda item: item.group)
    elif not processes.is_main():
        todo = []
    title, total = f"{evaluation.title} {model.name}", sum(item.work for item in todo)
    if todo:
        with Progress(title, total, unit="tokens", quiet=quiet) as progress:
            for batch in evaluation.measure(model, todo, progress):
                store.append(origin, [(item.key, row) for item, row in batch])
    store.collect()
    pairs = ((item, store.get(origin, item.key)) for item in items)
    return [(item, row) for item, row in pairs if row is not None]


def _cells(
    evaluation: Evaluation,
    models: Sequence[OpenCheckpoint],
    plans: Sequence[Plan],
    found: Mapping[str, Found],
) -> Iterator[Cell]:
    """Yield the cells of one evaluation, model by model."""
    reference: dict[tuple[Column, int | None], dict[str, Any]] | None = None
    for model, plan in zip(models, plans, strict=True):
        values: dict[tuple[Column, int | None], dict[str, Any]] = {}
        for item, row in found[model.name]:
            for column, at, name, value in evaluation.samples(item, row):
                values.setdefault((column, at), {})[name] = value
        for column, at in values | plan.reasons:
            own = values.get((column, at), {})
            estimate = column.quantity.estimate([*own.values()]) if own else None
            others, difference = (reference or {}).get((column, at), {}), None
            pairs = [(own[key], others[key]) for key in own if key in others]
            if pairs and not column.brief:
                difference = column.quantity.difference(*zip(*pairs, strict=True))
            reason = plan.reasons.get((column, at))
            yield Cell(
                evaluation.title, column.name, model.name, at, estimate, difference, reason, column
            )
        reference = values if reference is None else reference


def evaluate(
    models: Sequence[str] | str,
    evaluations: Sequence[Mapping[str, Any] | str] | Mapping[str, Any] | str,
    output: str | Path,
    *,
    device: str | None = None,
    quiet: bool = True,
) -> list[Cell]:
    """Evaluate models, and write tables, pictures and a report.

    Args:
        models: names as `load` takes them; the others are compared with the first one.
        evaluations: such as `{"kind": "passkey", "lengths": "1k,4k"}`, or names of suites.
        output: a folder, which is resumed; models, lengths, texts and prompts may be added.
        device: of the models; None for the CPU.
        quiet: show no progress.

    Returns:
        The cells of all tables.

    Raises:
        UserError: see `run`.
    """
    from longrnn.evaluation.report import write_report
    from longrnn.evaluation.suites import build_evaluation, read_suite

    names = [models] if isinstance(models, str) else models
    opened = [open_checkpoint(name, device=device) for name in names]
    built: list[Evaluation] = []
    for one in [evaluations] if isinstance(evaluations, str | Mapping) else evaluations:
        built += read_suite(one) if isinstance(one, str) else [build_evaluation(one)]
    folder = Path(output)
    outcomes = run(opened, built, folder, quiet=quiet)
    if processes.is_main():
        write_report(outcomes, folder)
    return [cell for outcome in outcomes for cell in outcome.cells]
