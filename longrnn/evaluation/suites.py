"""Suites: lists of evaluations in YAML, and the kinds of evaluation by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pydantic import Field

from longrnn.bundled import find
from longrnn.errors import UserError, nearest
from longrnn.evaluation.base import Evaluation
from longrnn.options import Options, Seed
from longrnn.yaml import read_mapping

SUITES = "eval/suites"
# Kinds of evaluation: the module and the name of each class.
KINDS = {
    "answers": "answers.Answers",
    "cost": "cost.Cost",
    "memory": "memory.Memory",
    "passkey": "passkey.PasskeyRetrieval",
    "perplexity": "perplexity.Perplexity",
    "reverse": "sequences.Sequences",
    "task": "sequences.Sequences",
}


class Suite(Options):
    """The content of a file."""

    evaluations: list[dict[str, Any]] = Field(min_length=1)
    seed: Seed = 0


def build_evaluation(spec: Mapping[str, Any]) -> Evaluation:
    """Build an evaluation from `{kind: …, option: value, …}`.

    Raises:
        UserError: an unknown kind or option, or a value that is not valid.
    """
    name = str(spec.get("kind"))
    if name not in KINDS:
        raise UserError(f"unknown evaluation {name!r}: {nearest(name, KINDS)}")
    options = {key: value for key, value in spec.items() if key != "kind"}
    if name == "reverse":
        options.setdefault("task", "reverse")
    module, _, attribute = KINDS[name].rpartition(".")
    try:
        return getattr(import_module(f"longrnn.evaluation.{module}"), attribute)(**options)
    except UserError as error:
        raise UserError(f"evaluation {options.get('name', name)!r}: {error}") from error


def read_suite(name_or_path: str) -> list[Evaluation]:
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
        return [build_evaluation({"seed": suite.seed} | spec) for spec in suite.evaluations]
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
