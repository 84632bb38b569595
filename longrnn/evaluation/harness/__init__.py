"""lm-eval with any model of ours; importing this registers the model type `longrnn` with it."""

from longrnn.evaluation.harness.command import run, scores
from longrnn.evaluation.harness.lm import LongRNN

__all__ = ["LongRNN", "run", "scores"]
