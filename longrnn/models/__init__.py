"""Language models built from the cells, their checkpoints, and text generation."""

from longrnn.models.base import LanguageModel as LanguageModel
from longrnn.models.base import LMOutput as LMOutput
from longrnn.models.config import RecurrentConfig as RecurrentConfig
from longrnn.models.generate import Generation as Generation
from longrnn.models.generate import generate as generate
from longrnn.models.recurrent import RecurrentLM as RecurrentLM
from longrnn.models.trainable import TrainableLM as TrainableLM
from longrnn.ops.rows import Rows as Rows
