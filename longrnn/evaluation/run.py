"""Runs evaluations and suites of them: measures what the store lacks, and writes the report."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field

from longrnn import processes
from longrnn.bundled import find
from longrnn.checkpoints.opened import OpenCheckpoint, open_checkpoint
from longrnn.errors import UserError
from longrnn.evaluation.base import Evaluation, Item, Plan, Results
from longrnn.evaluation.options import EVALUATIONS
from longrnn.options import Options, Seed
from longrnn.progress import Progress
from longrnn.reporting.tables import Column, ResultTable, TableCell, write_report
from longrnn.results import Origin, Result, Store
from longrnn.yaml import read_mapping

logger = logging.getLogger(__name__)

SUITES = "eval/suites"

# Values of samples by their names, by column and row of the table.
Samples = dict[tuple[Column, int | None], dict[str, Any]]


class Suite(Options):
    """The content of the file of a suite: a list of evaluations."""

    evaluations: list[dict[str, Any]] = Field(min_length=1)
    seed: Seed = 0


def build_evaluation(spec: Mapping[str, Any], *, seed: int | None = None) -> Evaluation[Any]:
    """Build an evaluation from `{kind: …, option: value, …}`.

    Args:
        spec: the kind and its options.
        seed: of an evaluation that has this option and does not set it.

    Raises:
        UserError: an unknown kind or option, or a value that is not valid.
    """
    kind = EVALUATIONS[str(spec.get("kind"))]
    given = {} if seed is None or "seed" not in kind.model_fields else {"seed": seed}
    return EVALUATIONS.build({**given, **spec}).evaluation()


def read_suite(name_or_path: str) -> list[Evaluation[Any]]:
    """Return the evaluations of a suite, in its order.

    Args:
        name_or_path: name of a bundled suite such as `quick`, or a YAML file.

    Raises:
        UserError: the suite is missing, or is not a mapping of `evaluations` and `seed`.
    """
    path = find(name_or_path, SUITES)
    content = read_mapping(path, "write evaluations: [{kind: passkey, …}]", kind="suite")
    try:
        suite = Suite(**content)
        return [build_evaluation(spec, seed=suite.seed) for spec in suite.evaluations]
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def evaluate(
    models: Sequence[str] | str,
    evaluations: Sequence[Mapping[str, Any] | str] | Mapping[str, Any] | str,
    output: str | Path,
    *,
    device: str | None = None,
    quiet: bool = True,
) -> list[TableCell]:
    """Evaluate models, and write tables, pictures and a report.

    Args:
        models: names as `load` takes them; the others are compared with the first.
        evaluations: such as `{"kind": "passkey", "lengths": "1k,4k"}`, or names of suites.
        output: a folder, which is resumed; models, lengths, texts and prompts may be added.
        device: of the models; None for the CPU.
        quiet: show no progress.

    Returns:
        The cells of all tables.

    Raises:
        UserError: see `run`.
    """
    names = [models] if isinstance(models, str) else models
    specs = [evaluations] if isinstance(evaluations, str | Mapping) else evaluations
    built: list[Evaluation[Any]] = []
    for spec in specs:
        built += read_suite(spec) if isinstance(spec, str) else [build_evaluation(spec)]
    opened = [open_checkpoint(name, device=device) for name in names]
    tables, _ = run_and_report(opened, built, Path(output), quiet=quiet)
    return [cell for table in tables for cell in table.cells]


def run_and_report(
    models: Sequence[OpenCheckpoint],
    evaluations: Sequence[Evaluation[Any]],
    folder: Path,
    *,
    quiet: bool = False,
) -> tuple[list[ResultTable], list[Path]]:
    """Measure as `run`, and write the report; return the tables and the report's files."""
    tables = run(models, evaluations, folder, quiet=quiet)
    return tables, write_report(tables, models, folder) if processes.is_main() else []


def run(
    models: Sequence[OpenCheckpoint],
    evaluations: Sequence[Evaluation[Any]],
    folder: Path,
    *,
    quiet: bool = False,
) -> list[ResultTable]:
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
    names = [model.name for model in models]
    for given in names, [evaluation.title for evaluation in evaluations]:
        if double := [name for name in given if given.count(name) > 1]:
            raise UserError(f"{double[0]!r} is given twice: give it once, or under two names")
    plans = [evaluation.plan(models) for evaluation in evaluations]
    every = [plan for of_evaluation in plans for plan in of_evaluation]
    if not any(plan.items for plan in every):
        raise UserError(next(reason for plan in every for reason in plan.reasons.values()))
    store = Store(folder)
    tables = []
    for evaluation, of_models in zip(evaluations, plans, strict=True):
        results = {
            model.name: _measured(evaluation, model, plan.items, store, quiet)
            for model, plan in zip(models, of_models, strict=True)
        }
        cells = list(_cells(evaluation, of_models, results))
        tables.append(ResultTable(evaluation, results, cells))
    return tables


def _measured(
    evaluation: Evaluation[Any],
    model: OpenCheckpoint,
    items: list[Item],
    store: Store,
    quiet: bool,
) -> Results:
    """Measure the missing items of one model, and return the results of all items."""
    prints = model.model.fingerprint(), model.tokenizer.fingerprint()
    protocol, bos = evaluation.protocol(model), model.tokenizer.bos_id
    protocol |= {} if bos is None else {"bos_id": bos}
    origin = Origin(evaluation.kind, *prints, protocol)
    # An item may be given twice, such as a text, and counts once.
    distinct = {origin.key(item.key): item for item in items}.values()
    todo = [
        item
        for item in distinct
        if (known := store.get(origin, item.key)) is None or not _fits(evaluation, item, known)
    ]
    if not evaluation.alone:
        todo = processes.share(todo, lambda item: item.group[:1], lambda item: item.group)
    elif not processes.is_main():
        todo = []
    title, total = f"{evaluation.title} {model.name}", sum(item.work for item in todo)
    if todo:
        with Progress(title, total, unit="tokens", quiet=quiet) as progress:
            for batch in evaluation.measure(model, todo, progress):
                store.append(origin, [(item.key, result) for item, result in batch])
    store.collect()
    pairs = ((item, store.get(origin, item.key)) for item in distinct)
    return [(item, result) for item, result in pairs if result is not None]


def _fits(evaluation: Evaluation[Any], item: Item, result: Result) -> bool:
    """Return whether a stored result has the numbers of an item; one that is damaged has not."""
    try:
        values = [sample.value for sample in evaluation.samples(item, result)]
    except (ArithmeticError, LookupError, TypeError, ValueError):
        values = [None]
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    is_damaged = not all(isinstance(number, float | int) for number in chain(*tuples))
    if is_damaged:
        logger.warning(f"a result of {evaluation.title} is damaged: it is measured again")
    return not is_damaged


def _cells(
    evaluation: Evaluation[Any], plans: Sequence[Plan], results: Mapping[str, Results]
) -> Iterator[TableCell]:
    """Yield the cells of one evaluation, model by model."""
    reference: Samples | None = None
    for plan, (model, measured) in zip(plans, results.items(), strict=True):
        samples: Samples = {}
        for item, result in measured:
            for column, at, name, value in evaluation.samples(item, result):
                samples.setdefault((column, at), {})[name] = value
        for column, at in samples | plan.reasons:
            values = samples.get((column, at), {})
            others = (reference or {}).get((column, at), {})
            shared = [name for name in values if name in others]
            difference = None
            if shared and not column.brief:
                difference = column.quantity.difference(
                    [values[name] for name in shared], [others[name] for name in shared]
                )
            yield TableCell(
                evaluation=evaluation.title,
                metric=column.name,
                model=model,
                at=at,
                estimate=column.quantity.estimate([*values.values()]) if values else None,
                difference=difference,
                reason=plan.reasons.get((column, at)),
                column=column,
            )
        reference = samples if reference is None else reference
