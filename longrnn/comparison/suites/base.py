"""Suites: what `longrnn compare` measures, as YAML, and the contract of one evaluation in them.

A suite is a list of evaluations, each `{kind: …, option: value, …}`. A kind is a class in
`EVALUATIONS`; its options are the keyword-only parameters of its constructor.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from longrnn.bundled import bundled
from longrnn.config import load_config
from longrnn.errors import UserError, nearest
from longrnn.files import check_name
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import Estimate
from longrnn.registry import Registry
from longrnn.seeds import check_seed
from longrnn.units import parse_lengths

# What a comparison writes beside the folders of its suites and evaluations.
RECORD, CELLS, REPORT = "suite.yaml", "comparison.jsonl", "report.html"
TAKEN = (RECORD, CELLS, REPORT)


class Metric(NamedTuple):
    """What a column of a comparison is about.

    Attributes:
        name: of the column.
        estimate: of a model's samples.
        difference: of one model's samples from those of another on the same items; None for what
            has no samples, such as seconds.
        form: how a value is written, as of `format`.
    """

    name: str
    estimate: Callable[[Sequence[Any]], Estimate]
    difference: Callable[[Sequence[Any], Sequence[Any]], Estimate] | None = None
    form: str = ".2f"


class Measurement(NamedTuple):
    """One metric of one model at one length.

    Attributes:
        metric: which.
        at: tokens; None where the metric knows no length.
        samples: values by item; two models are compared on the items that both have.
        reason: why there are none, where there are none.
    """

    metric: Metric
    at: int | None
    samples: dict[str, Any]
    reason: str | None = None


class Evaluation(ABC):
    """One evaluation of a suite: the same data and the same code for every model.

    Args:
        title: names its columns and files.
        seed: of the suite.

    Attributes:
        GROWING: options that may change without making earlier results another suite's.
        texts: files that it reads.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("lengths",)

    def __init__(self, title: str, seed: int) -> None:
        self.title, self.seed = title, check_seed(seed)
        self.texts: list[Path] = []

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        """Sees all models before anything is measured, the reference first.

        What no model can be asked is refused here, and what all models must share is made here.

        Raises:
            UserError: with the reason.
        """
        return

    def task_code(self) -> list[str]:
        """Files and folders of the user's own whose Python code this evaluation would run."""
        return []

    @abstractmethod
    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        """The points of one model, which `prepare` has seen.

        Args:
            model: any. A length that it cannot reach is a point with a reason.
            output: its results file, taken up where it was left.
            quiet: no progress.

        Raises:
            UserError: its logits are not finite, or the results are of something else.
        """


EVALUATIONS: Registry[Evaluation] = Registry("evaluation")


@dataclass
class SuiteConfig:
    """The schema of a suite.

    Attributes:
        evaluations: each a mapping with `kind`, its options and, where two are of one kind, `name`.
        seed: of everything that is drawn.
    """

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seed: int = 0


class Suite(NamedTuple):
    """A suite that was read.

    Attributes:
        name: of its file, without the ending.
        evaluations: in order.
        identity: what makes another suite of it: all but the options that may grow, by title.
        text: of the file.
    """

    name: str
    evaluations: list[Evaluation]
    identity: dict[str, Any]
    text: str


def read_suite(name_or_path: str) -> Suite:
    """Reads a suite.

    Args:
        name_or_path: of a bundled suite (`quick`), or a YAML file.

    Raises:
        UserError: no such suite, unknown keys, kinds or options, names that are not file names.
    """
    path = _find(name_or_path)
    name = check_name(path.stem, "a suite", TAKEN)
    config = load_config(SuiteConfig, path)
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
            check_name(title, "an evaluation", TAKEN)
            evaluation = EVALUATIONS.build(options, title, config.seed)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        evaluations.append(evaluation)
        identities[title] = {
            name: value for name, value in options.items() if name not in evaluation.GROWING
        }
    identity = {"seed": config.seed, "evaluations": identities}
    return Suite(name, evaluations, identity, path.read_text())


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    # `Path.is_file` fails at names that are too long for a file.
    if path.suffix in (".yaml", ".yml") or os.path.isfile(path):
        if not path.is_file():
            raise UserError(f"no suite {path}: give a YAML file, or a name: {', '.join(_names())}")
        return path
    known = _names()
    if name_or_path not in known:
        raise UserError(
            f"no suite {name_or_path!r}, neither bundled nor a file: {nearest(name_or_path, known)}"
        )
    return known[name_or_path]


def _names() -> dict[str, Path]:
    """The bundled suites."""
    return {path.stem: path for path in sorted((bundled() / "suites").glob("*.yaml"))}


def sorted_lengths(texts: Sequence[str]) -> list[int]:
    """Lengths as people write them, shortest first."""
    if not texts:
        raise UserError("lengths is empty: give some, such as [256, 1k, 4k]")
    return sorted(parse_lengths(",".join(texts)))
