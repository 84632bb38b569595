"""lm-eval with any model that longrnn loads; importing this registers the model type `longrnn`."""

from longrnn.evaluation.harness.command import find_tasks, run, scores
from longrnn.evaluation.harness.lm import LongRNN

__all__ = ["LongRNN", "find_tasks", "run", "scores"]
