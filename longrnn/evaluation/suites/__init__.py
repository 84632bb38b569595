"""What `longrnn compare` measures, one kind of evaluation a file."""

from longrnn.evaluation.suites.base import (
    EVALUATIONS,
    Contender,
    Evaluation,
    Metric,
    Point,
    Suite,
    read_suite,
)
from longrnn.evaluation.suites.cost import Cost
from longrnn.evaluation.suites.harness import Harness
from longrnn.evaluation.suites.passkey import PasskeyRetrieval
from longrnn.evaluation.suites.perplexity import BitsPerByte

__all__ = [
    "EVALUATIONS",
    "BitsPerByte",
    "Contender",
    "Cost",
    "Evaluation",
    "Harness",
    "Metric",
    "PasskeyRetrieval",
    "Point",
    "Suite",
    "read_suite",
]
