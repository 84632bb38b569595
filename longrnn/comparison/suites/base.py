"""Reads suites from YAML, and defines the interface of an evaluation.

A suite is a list of evaluations, each `{kind: …, option: value, …}`. A kind is a class in
`EVALUATIONS`; its options are the keyword-only parameters of its constructor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from longrnn.bundled import find
from longrnn.config import load_config
from longrnn.errors import UserError
from longrnn.files import check_name
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import Estimate
from longrnn.registry import Registry
from longrnn.seeds import check_seed
from longrnn.units import parse_lengths

# Files of a comparison, whose names suites and evaluations cannot have.
RECORD, CELLS, REPORT = "suite.yaml", "comparison.jsonl", "report.html"
RESERVED = (RECORD, CELLS, REPORT)
SUITES = "eval/suites"


class Metric(NamedTuple):
    """A column of a comparison.

    Attributes:
        name: name of the column.
        estimate: computes the estimate from a model's samples.
        difference: computes the difference of a model's samples from those of another on the same
            items; None for metrics without samples, such as seconds.
        form: format specification of values.
    """

    name: str
    estimate: Callable[[Sequence[Any]], Estimate]
    difference: Callable[[Sequence[Any], Sequence[Any]], Estimate] | None = None
    form: str = ".2f"


class Measurement(NamedTuple):
    """One metric of one model at one length.

    Attributes:
        metric: the column.
        at: length in tokens; None for a metric without lengths.
        samples: values by item; two models are compared on the items that both have.
        reason: why there are no samples.
    """

    metric: Metric
    at: int | None
    samples: dict[str, Any]
    reason: str | None = None


class Evaluation(ABC):
    """One evaluation of a suite, with the same data for every model.

    Args:
        title: name of its columns and files.
        seed: seed of the suite.

    Attributes:
        GROWING: options that may change while earlier results stay valid.
        texts: files that it reads.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("lengths",)

    def __init__(self, title: str, seed: int) -> None:
        self.title, self.seed = title, check_seed(seed)
        self.texts: list[Path] = []

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        """Prepare data that all models share, before the first measurement.

        Args:
            models: all models, the reference first.

        Raises:
            UserError: the evaluation is not possible with these models.
        """
        return

    def task_code(self) -> list[str]:
        """Return the user's task files and folders whose Python code the evaluation would run."""
        return []

    @abstractmethod
    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        """Measure one model.

        Args:
            model: one of the models given to `prepare`. A length above its maximum length gives a
                measurement with a reason.
            output: its results file, which is resumed.
            quiet: show no progress.

        Raises:
            UserError: the logits are not finite, or `output` has results of another run.
        """


EVALUATIONS: Registry[Evaluation] = Registry("evaluation")


@dataclass
class SuiteConfig:
    """The schema of a suite.

    Attributes:
        evaluations: mappings with `kind`, options and, if two have the same kind, `name`.
        seed: seed of everything that is drawn.
    """

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seed: int = 0


class Suite(NamedTuple):
    """A suite.

    Attributes:
        name: name of its file, without the ending.
        evaluations: in the order of the file.
        identity: all settings except those that may grow; if they differ, it is another suite.
        text: content of the file.
    """

    name: str
    evaluations: list[Evaluation]
    identity: dict[str, Any]
    text: str


def read_suite(name_or_path: str) -> Suite:
    """Read a suite.

    Args:
        name_or_path: name of a bundled suite (`quick`), or a YAML file.

    Raises:
        UserError: there is no such suite, it has unknown keys, kinds or options, or names that are
            not valid file names.
    """
    path = find(name_or_path, SUITES)
    name = check_name(path.stem, "a suite", RESERVED)
    config = load_config(SuiteConfig, path, examples=SUITES)
    if not config.evaluations:
        raise UserError(f"{path} has no evaluations: add some, such as {{kind: passkey, …}}")
    identities: dict[str, Any] = {}
    evaluations = []
    for spec in config.evaluations:
        options = dict(spec)
        title = str(options.pop("name", options.get("kind")))
        if title in identities:
            raise UserError(f"{path}: two evaluations are called {title!r}: give one another name")
        try:
            check_name(title, "an evaluation", RESERVED)
            evaluation = EVALUATIONS.build(options, title, config.seed)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        evaluations.append(evaluation)
        identities[title] = settings(options)
    identity = {"seed": config.seed, "evaluations": identities}
    return Suite(name, evaluations, identity, path.read_text())


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of an evaluation, given or not, but for those that may grow.

    Options that an earlier version recorded and that are not valid any more stay as they are.
    """
    if options.get("kind") not in EVALUATIONS:
        return dict(options)
    growing = EVALUATIONS[options["kind"]].GROWING
    lasting = {name: value for name, value in options.items() if name not in growing}
    try:
        whole = EVALUATIONS.complete(lasting)
    except UserError:
        return lasting
    return {name: value for name, value in whole.items() if name not in growing}


def sorted_lengths(texts: Sequence[str]) -> list[int]:
    """Parse lengths such as `4k`; return them in ascending order."""
    if not texts:
        raise UserError("lengths is empty: give some, such as [256, 1k, 4k]")
    return sorted(parse_lengths(",".join(texts)))
