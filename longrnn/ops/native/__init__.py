"""Fused CPU kernels in C++, where they were compiled: see `kernels.cpp`, and one header per topic.

`setup.py` compiles them at installation, once per instruction set, if there is a C++ compiler. The
best library for this machine is loaded on first use; `missing()` says why there is none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from longrnn.ops.native.sources import is_current
from longrnn.ops.transforms import is_transformed

# Instruction sets by the names that torch gives them, best first, and the suffix of the library.
CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2", "DEFAULT": "generic"}
MOST_TAPS = 16  # of the convolution, as in cell.h
KINDS = {torch.float32: ("f32", ctypes.c_float), torch.float64: ("f64", ctypes.c_double)}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels for this machine; None if there are none that it can use."""
    loaded = _loaded()
    return loaded if loaded is not None and is_current(loaded) else None


def _loaded() -> ctypes.CDLL | None:
    """The library of the best instruction set; None if there is none that this machine can run."""
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
    loaded = _loaded()
    if loaded is not None and not is_current(loaded):
        return (
            "the C++ kernels were compiled from other sources than these: compile them again with "
            "`pip install -e .` in the checkout"
        )
    return (
        "the C++ kernels were not compiled: install longrnn from its source with a C++ compiler "
        "(Debian: apt install g++)"
    )


def suits(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: one dtype that they know, and memory to read."""
    dtype = tensors[0].dtype
    return dtype in KINDS and all(one.dtype == dtype for one in tensors) and readable(tensors)


def tracked(given: Sequence[Tensor]) -> bool:
    """Whether a gradient of some of these tensors is needed."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def readable(given: Sequence[Tensor]) -> bool:
    """Whether the kernels may read the memory of tensors."""
    return in_memory(given) and not is_transformed()


def in_memory(given: Sequence[Tensor]) -> bool:
    """Whether tensors are plain ones on the CPU."""
    return all(one.device.type == "cpu" and type(one) in (Tensor, Parameter) for one in given)


# The forward pass keeps the state after so many tokens for its gradient, which computes the others.
SEGMENT = 512


class Weights(NamedTuple):
    """The parameters of a Mamba-2 between its projections, as the model keeps them.

    The kernel reads them in the dtype of the state or in bfloat16, so that nothing is prepared that
    could become stale; other dtypes are cast in each call.

    Attributes:
        conv_weight: `(c, 1, k)`.
        conv_bias: `(c,)` or None.
        dt_bias: `(h,)`.
        A_log: `(h,)`, A = −exp(A_log).
        D: `(h,)`.
        norm_weight: `(h p,)`.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    norm_weight: Tensor


def cell_suits(projected: Tensor, weights: Weights, conv: Tensor, state: Tensor) -> bool:
    """Whether `cell` takes these tensors."""
    given = (projected, conv, *(weight for weight in weights if weight is not None))
    return suits(state) and readable(given) and weights.conv_weight.shape[-1] <= MOST_TAPS


def cell(
    projected: Tensor,
    weights: Weights,
    conv: Tensor,
    state: Tensor,
    *,
    groups: int,
    norm_eps: float,
    dt_limit: tuple[float, float],
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Everything between the two projections of a Mamba-2.

    Args:
        projected: `(b, t, h p + c + h)`, c = h p + 2 g n: z, x B C and dt.
        weights: see `Weights`.
        conv: `(b, k − 1, c)`, the last inputs of the convolution.
        state: `(b, h, p, n)`.
        groups: g, of B and C and of the norm.
        norm_eps: added to the mean square.
        dt_limit: least and largest dt.
        kept: what the gradient needs is written to it: the output of the recurrence `(b, t, h p)`,
            and the states that `scan` keeps.

    Returns:
        y `(b, t, h p)`, and both states after the last token, each in the dtype that it was given
        in; None if y is not finite.
    """
    b, h, p, n = state.shape
    t = projected.shape[1]
    state = state.contiguous()
    given = [_mixed(one, state.dtype) for one in (projected, *weights, conv)]
    # Not on torch's default device, which may be another one.
    y = projected.new_empty((b, t, h * p))
    after = [one.new_empty(one.shape) for one in (conv, state)]
    written = [_mixed(one, state.dtype) for one in (after[0], y)]
    kind, real = KINDS[state.dtype]
    arguments = _cell_type(real)(
        b, t, h, p, groups, n, weights.conv_weight.shape[-1], groups,
        norm_eps, *dt_limit,
        state.data_ptr(), after[1].data_ptr(),
        *chain.from_iterable(
            (None, 0) if one is None else (one.data_ptr(), one.dtype == torch.bfloat16)
            for one in (*given, *written)
        ),
        *((one.data_ptr() for one in kept) if kept else (None, None)), SEGMENT,
    )  # fmt: skip
    if not call(f"longrnn_cell_{kind}", arguments):
        return None
    for mine, own in zip((after[0], y), written, strict=True):
        if own is not None and mine is not own:
            mine.copy_(own)
    return y, after[0], after[1]


def _mixed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor as the kernel of `cell` reads it: contiguous, in `dtype` or in bfloat16."""
    if tensor is None:
        return None
    narrow = tensor.dtype == torch.bfloat16 and dtype == torch.float32
    return (tensor if narrow or tensor.dtype == dtype else tensor.to(dtype)).contiguous()


# At most so many rows: the kernel of `few_rows` reads each weight once for all of them.
FEW_ROWS = 4
FEW_WEIGHTS = 2**13  # Below it the call takes longer than torch's product.
# As in few_rows.h.
FEW_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.int8: 3}


def few_rows_suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `few_rows` takes these tensors, and is the right choice for them."""
    return (
        x.dtype in FEW_KINDS
        and weight.dtype in (x.dtype, torch.int8)
        and x.shape[-1] == weight.shape[1]
        and 0 < x.numel() <= FEW_ROWS * weight.shape[1]
        and weight.numel() >= FEW_WEIGHTS
        and weight.is_contiguous()
        and readable(given := (x, weight) if bias is None else (x, weight, bias))
        and not tracked(given)
        and not torch.is_autocast_enabled("cpu")
        and available()
    )


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias for at most FEW_ROWS rows, summed in float32.

    Args:
        x: `(…, k)`.
        weight: `(m, k)`; if int8, each row is multiplied by its scale.
        bias: `(m,)` or None.
        scale: `(m,)` float32, of an int8 weight.
    """
    m, k = weight.shape
    wide = x.to(torch.float32).contiguous()
    y = wide.new_empty(*x.shape[:-1], m)
    kind = FEW_KINDS[weight.dtype]
    factors = None if scale is None else scale.data_ptr()
    sizes = (x.numel() // k, m, k, kind)
    call("longrnn_few", _Few(*sizes, weight.data_ptr(), factors, wide.data_ptr(), y.data_ptr()))
    return (y if bias is None else y + bias).to(x.dtype)


OUT_OF_MEMORY = -1  # as in kernels.cpp


def call(name: str, arguments: ctypes.Structure) -> int:
    """What a kernel returns; MemoryError if there is not enough memory for what it computes."""
    kernels = library()
    assert kernels is not None, missing()
    found = getattr(kernels, name)(ctypes.byref(arguments))
    if found == OUT_OF_MEMORY:
        raise MemoryError(f"in the kernel {name}")
    return found


class _Few(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("rows", "m", "k", "kind")),
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "x", "y")),
    ]


@cache
def _cell_type(real: Any) -> type[ctypes.Structure]:
    mixed = ("projected", *Weights._fields, "conv", "conv_after", "y")
    fields = [
        *((name, ctypes.c_long) for name in (*"bthpgnk", "norm_groups")),
        *((name, real) for name in ("norm_eps", "dt_least", "dt_largest")),
        *((name, ctypes.c_void_p) for name in ("state", "state_after")),
    ]
    for name in mixed:
        fields += [(name, ctypes.c_void_p), (f"{name}_is_bfloat16", ctypes.c_long)]
    fields += [("scanned", ctypes.c_void_p), ("kept", ctypes.c_void_p), ("segment", ctypes.c_long)]
    return type("_Cell", (ctypes.Structure,), {"_fields_": fields})
