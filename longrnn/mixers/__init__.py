"""Sequence mixers: the recurrent cells, one per file."""

from longrnn.mixers.base import MIXERS, Mixer, ScanningMixer
from longrnn.mixers.composed import Composed
from longrnn.mixers.edits import (
    Edit,
    EditedState,
    Steps,
    Update,
    UpdateRule,
    init_carries,
)
from longrnn.mixers.gru import GRU
from longrnn.mixers.init import INITS
from longrnn.mixers.lstm import LSTM
from longrnn.mixers.mamba2 import Mamba2
from longrnn.mixers.rnn import RNN
from longrnn.mixers.stepwise import StepwiseMixer

__all__ = [
    "GRU",
    "INITS",
    "LSTM",
    "MIXERS",
    "RNN",
    "Composed",
    "Edit",
    "EditedState",
    "Mamba2",
    "Mixer",
    "ScanningMixer",
    "Steps",
    "StepwiseMixer",
    "Update",
    "UpdateRule",
    "init_carries",
]
