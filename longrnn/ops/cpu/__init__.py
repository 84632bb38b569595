"""C++ kernels for a CPU, where they were compiled: see `kernels.cpp`, and one header per topic.

`setup.py` compiles them at installation, once per instruction set, if there is a C++ compiler.
"""

from longrnn.ops.cpu.kernels import (
    FEW_KINDS,
    FEW_ROWS,
    MIXED,
    MOST_TAPS,
    Layer,
    cell,
    conv,
    few_rows,
    few_rows_suits,
    gate,
    layers,
    limit,
    pack_layers,
    refusal,
    scan,
    stepwise,
    stepwise_suits,
    tracked,
)
from longrnn.ops.cpu.library import missing

__all__ = [
    "FEW_KINDS",
    "FEW_ROWS",
    "MIXED",
    "MOST_TAPS",
    "Layer",
    "cell",
    "conv",
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
