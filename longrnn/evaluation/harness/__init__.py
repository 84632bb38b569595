"""lm-eval with any model that longrnn loads; importing this registers the model type `longrnn`."""

from longrnn.evaluation.harness.command import run
from longrnn.evaluation.harness.lm import LongRNN

__all__ = ["LongRNN", "run"]
