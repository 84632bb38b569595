"""The suites of `longrnn compare`, with one module per kind of evaluation."""

from longrnn.comparison.suites.answers import Answers
from longrnn.comparison.suites.base import (
    EVALUATIONS,
    Evaluation,
    Measurement,
    Metric,
    Suite,
    read_suite,
)
from longrnn.comparison.suites.cost import Cost
from longrnn.comparison.suites.harness import Harness
from longrnn.comparison.suites.passkey import PasskeyRetrieval
from longrnn.comparison.suites.perplexity import BitsPerByte
from longrnn.comparison.suites.sequences import Sequences

__all__ = [
    "EVALUATIONS",
    "Answers",
    "BitsPerByte",
    "Cost",
    "Evaluation",
    "Harness",
    "Measurement",
    "Metric",
    "PasskeyRetrieval",
    "Sequences",
    "Suite",
    "read_suite",
]
