"""lm-eval with any model that longrnn loads; importing this registers the model type `longrnn`."""

from longrnn.evaluation.harness.command import explained, find_tasks, run
from longrnn.evaluation.harness.lm import LongRNN

__all__ = ["LongRNN", "explained", "find_tasks", "run"]
