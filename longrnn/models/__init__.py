"""Language models built from the cells, their checkpoints, and text generation."""

from longrnn.models.base import LanguageModel, LMOutput
from longrnn.models.config import RecurrentConfig
from longrnn.models.generate import Generation, generate
from longrnn.models.recurrent import RecurrentLM
from longrnn.models.trainable import TrainableLM
from longrnn.ops.rows import Rows

__all__ = [
    "Generation",
    "LMOutput",
    "LanguageModel",
    "RecurrentConfig",
    "RecurrentLM",
    "Rows",
    "TrainableLM",
    "generate",
]
