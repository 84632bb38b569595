"""The recurrence by the GPU kernels of other libraries: flash-linear-attention and mamba-ssm.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from longrnn.ops.scan import ScanInputs


def fla_scan(inputs: ScanInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.scan`; by `chunk_simple_gla`, or `fused_recurrent_simple_gla`."""
    raise NotImplementedError


def mamba_ssm_scan(inputs: ScanInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@cache
def _has(package: str) -> bool:
    return find_spec(package) is not None


def fla_refusal(tensors: Sequence[Tensor | None]) -> str | None:
    """Why flash-linear-attention cannot compute this call; None if it can."""
    if any(one is not None and one.device.type != "cuda" for one in tensors):
        return "its tensors are not on an NVIDIA GPU"
    if not _has("fla"):
        return "flash-linear-attention is not installed: pip install fla-core"
    return None


def mamba_ssm_refusal(tensors: Sequence[Tensor | None]) -> str | None:
    """Why mamba-ssm cannot compute this call; None if it can."""
    if any(one is not None and one.device.type != "cuda" for one in tensors):
        return "its tensors are not on an NVIDIA GPU"
    if not _has("mamba_ssm"):
        return "mamba-ssm is not installed: pip install mamba-ssm"
    return None
