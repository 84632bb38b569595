"""GPU kernels of other libraries: flash-linear-attention and mamba-ssm. Not yet run on a GPU.

Notable choices:
- Everything is given in float32, also for models in bfloat16. Triton would compute the products in
  TF32, with 11 significant bits. `TRITON_F32_DEFAULT=tf32x3`, which is set where the environment
  sets nothing else, makes three such products of each, with about 22 bits.
- Both libraries add up log decays in float32, `longrnn.ops.scan` in float64. Where strong decays or
  document starts come before slow decays, results differ by up to 1e-5 with flash-linear-attention
  (see `LEAST_GPU_LOG_DECAY`), and by some 1e-4 with mamba-ssm.
"""

import os
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import version

import torch
from torch import Tensor

from longrnn.files import one_line
from longrnn.ops.cpu.checks import refuse_second_derivatives
from longrnn.ops.transforms import is_transformed

# fla-core before 0.6 has 32-bit offsets. With Triton before 3.7.1, its gradients are wrong on
# Hopper GPUs.
FLA_PACKAGES = ("fla-core>=0.6", "triton>=3.7.1")

# Up to this many tokens are computed one by one, as in the layers of flash-linear-attention, and so
# are calls with more rows times heads than blocks fit into the second axis of a grid.
FLA_FEW, FLA_MOST = 64, 2**16 - 1
# The least log decay, also at document starts, where −∞ − −∞ would be NaN. It keeps 1e-13 of the
# state before it, far less than float32 rounds away. Running sums near it are rounded to 2e-6: the
# relative error of the decays after it in its chunk. With −1e4 the error would be 1e-3.
LEAST_GPU_LOG_DECAY = -30.0


def fla_takes_few(x: Tensor) -> bool:
    """Whether flash-linear-attention computes a call `(b, t, h, …)` token by token."""
    rows, time, heads = x.shape[:3]
    return time <= FLA_FEW or rows * heads > FLA_MOST


def once_differentiable(y: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results of a kernel, which raise a `UserError` in second derivatives."""
    for result in (y, state):
        if result.requires_grad:
            result.register_hook(lambda _: refuse_second_derivatives("GPU"))
    return y, state


def refusal(tensors: Iterable[Tensor | None], module: str, *packages: str) -> str | None:
    """Why kernels of a library cannot compute a call; None if they can.

    Args:
        tensors: everything that the call reads.
        module: see `missing`.
        packages: see `missing`.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if torch.version.hip is not None or tensor.device.type != "cuda":
            return "its tensors are not on an NVIDIA GPU"
        if tensor.dtype == torch.float64:
            return "it computes in float32, and its tensors are float64"
    if is_transformed():
        return "torch transforms or records its operations"
    os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")
    return missing(module, *packages)


@cache
def missing(module: str, *packages: str) -> str | None:
    """Why a module cannot be used, and what to do; None if it can.

    Args:
        module: its name; it is imported.
        packages: what must be installed, with the oldest versions.
    """
    from packaging.requirements import Requirement  # no CPU needs it

    try:
        for package in map(Requirement, packages):
            if (installed := version(package.name)) not in package.specifier:
                raise ImportError(f"{package.name} {installed} is installed")
        import_module(module)
    except Exception as error:  # compiled parts raise OSError or RuntimeError on another machine
        quoted = " ".join(f"'{package}'" for package in packages)
        return f"{module} cannot be imported ({one_line(error)}): pip install {quoted}"
    return None
