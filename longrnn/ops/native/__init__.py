"""Fused CPU kernels in C++, where they were compiled: see `kernels.cpp`.

`setup.py` compiles them at installation, once per instruction set, if there is a C++ compiler. The
best library for this machine is loaded on first use; `missing()` says why there is none.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level  # pyright: ignore[reportMissingImports]
from torch.nn import Parameter

# Instruction sets by the names that torch gives them, best first, and the suffix of the library.
CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2", "DEFAULT": "generic"}
MOST_TAPS = 16  # of the convolution, as in kernels.cpp
KINDS = {torch.float32: ("f32", ctypes.c_float), torch.float64: ("f64", ctypes.c_double)}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels for this machine; None if there are none that it can run."""
    names = list(CAPABILITIES)
    found = torch.backends.cpu.get_cpu_capability()
    best = names.index(found) if found in names else len(names) - 1
    for name in names[best:]:
        for path in sorted(Path(__file__).parent.glob(f"_{CAPABILITIES[name]}.*")):
            if path.suffix in (".so", ".pyd", ".dylib"):
                # torch has loaded the OpenMP library that the kernels need: they share its threads.
                return ctypes.CDLL(str(path))
    return None


def available() -> bool:
    """Whether this machine can run the kernels."""
    return library() is not None


def missing() -> str | None:
    """Why the kernels cannot run, and what to do; None if they can."""
    if available():
        return None
    return (
        "the C++ kernels were not compiled: install longrnn from its source with a C++ compiler "
        "(Debian: apt install g++)"
    )


def suits(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors: one dtype that they know, on the CPU, no gradient."""
    given = [tensor for tensor in tensors if tensor is not None]
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return (
        not tracked
        and given[0].dtype in KINDS
        and all(
            tensor.dtype == given[0].dtype
            and tensor.device.type == "cpu"
            and type(tensor) in (Tensor, Parameter)
            for tensor in given
        )
        # Tensors that torch.func transforms have no memory to read.
        and maybe_current_level() is None
    )


class Sizes(NamedTuple):
    """b rows, t tokens, h heads, p channels per head, g groups, n numbers of state per channel."""

    b: int
    t: int
    h: int
    p: int
    g: int
    n: int


def scan(
    x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay_t) h_{t−1} + x_t B_tᵀ, y_t = h_t C_t.

    Args:
        x: `(b, t, h, p)`.
        log_decay: `(b, t, h)`.
        B: `(b, t, g, n)`.
        C: `(b, t, g, n)`.
        state: `(b, h, p, n)`.

    Returns:
        y `(b, t, h, p)`, and the state after the last token.
    """
    sizes = Sizes(*x.shape, *B.shape[2:])
    x, log_decay, B, C, state = (part.contiguous() for part in (x, log_decay, B, C, state))
    y, final = torch.empty_like(x), torch.empty_like(state)
    kind, _ = KINDS[state.dtype]
    steps = (sizes.h * sizes.p, sizes.g * sizes.n)
    arguments = _Scan(
        *sizes,
        x.data_ptr(), sizes.t * steps[0], steps[0], None, log_decay.data_ptr(),
        B.data_ptr(), C.data_ptr(), sizes.t * steps[1], steps[1],
        state.data_ptr(), y.data_ptr(), final.data_ptr(),
    )  # fmt: skip
    _call(f"longrnn_scan_{kind}", arguments)
    return y, final


class Weights(NamedTuple):
    """The parameters of a Mamba-2 between its projections, all in one dtype and contiguous.

    Attributes:
        conv_weight: `(k, c)`.
        conv_bias: `(c,)` or None.
        dt_bias: `(h,)`.
        A: `(h,)`, below 0.
        D: `(h,)`.
        norm_weight: `(h p,)`.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A: Tensor
    D: Tensor
    norm_weight: Tensor


def cell(
    projected: Tensor,
    weights: Weights,
    conv: Tensor,
    state: Tensor,
    *,
    groups: int,
    norm_eps: float,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything between the two projections of a Mamba-2.

    Args:
        projected: `(b, t, h p + c + h)`, c = h p + 2 g n: z, x B C and dt.
        weights: see `Weights`.
        conv: `(b, k − 1, c)`, the last inputs of the convolution.
        state: `(b, h, p, n)`.
        groups: g, of B and C and of the norm.
        norm_eps: added to the mean square.
        dt_limit: least and largest dt.

    Returns:
        y `(b, t, h p)`, and both states after the last token.
    """
    b, h, p, n = state.shape
    t = projected.shape[1]
    projected, conv, state = projected.contiguous(), conv.contiguous(), state.contiguous()
    y = projected.new_empty(b, t, h * p)
    conv_after, state_after = torch.empty_like(conv), torch.empty_like(state)
    kind, real = KINDS[state.dtype]
    arguments = _cell_type(real)(
        b, t, h, p, groups, n, len(weights.conv_weight), groups,
        projected.data_ptr(),
        *(None if part is None else part.data_ptr() for part in weights),
        norm_eps, *dt_limit,
        conv.data_ptr(), state.data_ptr(),
        y.data_ptr(), conv_after.data_ptr(), state_after.data_ptr(),
    )  # fmt: skip
    _call(f"longrnn_cell_{kind}", arguments)
    return y, conv_after, state_after


def _call(name: str, arguments: ctypes.Structure) -> None:
    kernels = library()
    assert kernels is not None, missing()
    getattr(kernels, name)(ctypes.byref(arguments))


class _Scan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in "bthpgn"),
        ("x", ctypes.c_void_p), ("x_row", ctypes.c_long), ("x_token", ctypes.c_long),
        ("gain", ctypes.c_void_p), ("log_decay", ctypes.c_void_p),
        ("B", ctypes.c_void_p), ("C", ctypes.c_void_p),
        ("bc_row", ctypes.c_long), ("bc_token", ctypes.c_long),
        ("state", ctypes.c_void_p), ("y", ctypes.c_void_p), ("final_state", ctypes.c_void_p),
    ]  # fmt: skip


@cache
def _cell_type(real: Any) -> type[ctypes.Structure]:
    names = ("projected", "conv_weight", "conv_bias", "dt_bias", "A", "D", "norm_weight")
    after = ("conv", "state", "y", "conv_after", "state_after")
    fields = [
        *((name, ctypes.c_long) for name in (*"bthpgnk", "norm_groups")),
        *((name, ctypes.c_void_p) for name in names),
        *((name, real) for name in ("norm_eps", "dt_least", "dt_largest")),
        *((name, ctypes.c_void_p) for name in after),
    ]
    return type("_Cell", (ctypes.Structure,), {"_fields_": fields})
