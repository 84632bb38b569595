"""Language models built from the mixers, their checkpoints, and text generation."""

from longrnn.models.base import EditableModel, LanguageModel, LMOutput
from longrnn.models.generate import Generation, generate
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

__all__ = [
    "EditableModel",
    "Generation",
    "LMOutput",
    "LanguageModel",
    "RecurrentConfig",
    "RecurrentLM",
    "generate",
]
