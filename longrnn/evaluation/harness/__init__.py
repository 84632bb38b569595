"""lm-eval with any model of ours; importing this registers the model type `longrnn` with it."""

from longrnn.evaluation.harness.command import find_tasks, run, scores
from longrnn.evaluation.harness.lm import LongRNN

__all__ = ["LongRNN", "find_tasks", "run", "scores"]
