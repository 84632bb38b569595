"""C++ kernels for a CPU, where they were compiled: see `kernels.cpp`, and one header per topic.

`setup.py` compiles them at installation, once per instruction set, if there is a C++ compiler.
"""

from longrnn.ops.cpu.layer import MIXED, MOST_TAPS, cell, conv, gate
from longrnn.ops.cpu.library import missing
from longrnn.ops.cpu.recurrence import delta, limit, refusal, scan, tracked
from longrnn.ops.cpu.tokens import (
    FEW_ROWS,
    Layer,
    Tokens,
    few_rows,
    few_rows_suits,
    layers,
    pack_layers,
    stepwise,
    stepwise_suits,
)

__all__ = [
    "FEW_ROWS",
    "MIXED",
    "MOST_TAPS",
    "Layer",
    "Tokens",
    "cell",
    "conv",
    "delta",
    "few_rows",
    "few_rows_suits",
    "gate",
    "layers",
    "limit",
    "missing",
    "pack_layers",
    "refusal",
    "scan",
    "stepwise",
    "stepwise_suits",
    "tracked",
]
