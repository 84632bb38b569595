"""The recurrent cells."""

from longrnn.cells.base import MIXERS, Cell, EditedState
from longrnn.cells.edit import Edit, StepChange, Steps, Update, merge
from longrnn.cells.gated_deltanet import GatedDeltaNet
from longrnn.cells.init import INITS
from longrnn.cells.kda import KDA
from longrnn.cells.mamba import Mamba
from longrnn.cells.mamba2 import Mamba2
from longrnn.cells.mamba3 import Mamba3
from longrnn.cells.recurrent import GRU, LSTM, RNN
from longrnn.cells.scanning import ScanningCell
from longrnn.cells.stepwise import StepwiseCell
from longrnn.cells.torch_cell import TorchCell

__all__ = [
    "GRU",
    "INITS",
    "KDA",
    "LSTM",
    "MIXERS",
    "RNN",
    "Cell",
    "Edit",
    "EditedState",
    "GatedDeltaNet",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "ScanningCell",
    "StepChange",
    "Steps",
    "StepwiseCell",
    "TorchCell",
    "Update",
    "merge",
]
