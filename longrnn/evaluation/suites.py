"""Suites: lists of evaluations in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from longrnn.bundled import find
from longrnn.errors import UserError
from longrnn.evaluation.options import EVALUATIONS
from longrnn.options import Options, Seed
from longrnn.yaml import read_mapping

if TYPE_CHECKING:
    from longrnn.evaluation.base import Evaluation

SUITES = "eval/suites"


class Suite(Options):
    """The content of a file."""

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
    options = {key: value for key, value in spec.items() if key != "kind"}
    if seed is not None and "seed" in kind.model_fields:
        options.setdefault("seed", seed)
    try:
        return kind(**options).evaluation()
    except UserError as error:
        name = options.get("name", spec["kind"])
        raise UserError(f"evaluation {name!r}: {error}") from error


def read_suite(name_or_path: str) -> list[Evaluation[Any]]:
    """Return the evaluations of a suite, in its order.

    Args:
        name_or_path: name of a bundled suite such as `quick`, or a YAML file.

    Raises:
        UserError: there is no such suite, or it is not a mapping of `evaluations` and `seed`.
    """
    path = find(name_or_path, SUITES)
    content = read_mapping(path, "write evaluations: [{kind: passkey, …}]", kind="suite")
    try:
        suite = Suite(**content)
        return [build_evaluation(spec, seed=suite.seed) for spec in suite.evaluations]
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
