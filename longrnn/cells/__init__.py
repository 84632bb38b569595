"""The recurrent cells."""

from longrnn.cells.base import MIXERS as MIXERS
from longrnn.cells.base import Cell as Cell
from longrnn.cells.base import EditedState as EditedState
from longrnn.cells.delta import KDA as KDA
from longrnn.cells.delta import GatedDeltaNet as GatedDeltaNet
from longrnn.cells.edit import Edit as Edit
from longrnn.cells.edit import StepChange as StepChange
from longrnn.cells.edit import Steps as Steps
from longrnn.cells.edit import Update as Update
from longrnn.cells.edit import merge as merge
from longrnn.cells.init import INITS as INITS
from longrnn.cells.mamba import Mamba as Mamba
from longrnn.cells.mamba2 import Mamba2 as Mamba2
from longrnn.cells.mamba3 import Mamba3 as Mamba3
from longrnn.cells.recurrent import GRU as GRU
from longrnn.cells.recurrent import LSTM as LSTM
from longrnn.cells.recurrent import RNN as RNN
from longrnn.cells.scanning import ScanningCell as ScanningCell
from longrnn.cells.stepwise import StepwiseCell as StepwiseCell
from longrnn.cells.torch_cell import TorchCell as TorchCell
