"""The recurrence in C++ on a CPU, where the kernels were compiled: see `longrnn/ops/native`.

The kernels have no backward pass: calls that need gradients, and tensors on other devices, are
computed by `chunked`, which gives the same values to rounding.
"""

from __future__ import annotations

from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops import native as kernels
from longrnn.ops.rows import all_finite, finite_rows, run_by_finiteness
from longrnn.ops.ssd import chunked
from longrnn.ops.ssd.base import ScanInputs


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`.

    Raises:
        UserError: the kernels were not compiled.
    """
    if (why := kernels.missing()) is not None:
        raise UserError(f"{why}; or use the backend chunked")
    # A cast may need memory, and drops nothing: chunked computes in the dtype of the state too.
    wide = ScanInputs(*(tensor.to(state.dtype) for tensor in inputs))
    if not kernels.suits(*wide, state):
        return chunked.ssd(inputs, state)
    y, final = _scan(wide, state)
    # The output of a token depends on its whole input and state, so checking it suffices.
    if all_finite(y):
        return y, final
    finite = finite_rows(y)
    if bool(finite.all()):
        return y, final
    return run_by_finiteness(finite, _scan, chunked.sequential, wide, state)


def _scan(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.scan(*inputs, state)
