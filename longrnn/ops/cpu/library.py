"""Loads the compiled kernels and calls them, with arguments packed by the table of `signatures`.

`ctypes` and not `torch.library`, because decoding makes a call per product or token: an operator of
torch adds 3 (`Library.impl`) to 24 microseconds (`custom_op`) to a call of 8, on an Intel Xeon with
torch 2.13 (November 2026).
"""

import ctypes
import platform
from collections.abc import Callable, Iterator
from functools import cache
from os import environ
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import signatures

# Instruction sets by the names that torch gives them, best first, and the suffix of the library.
CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2", "DEFAULT": "generic"}
TYPE_SUFFIXES = {torch.float32: "_f32", torch.float64: "_f64"}
REALS = {torch.float32: "f", torch.float64: "d"}
POINTERS = ("in", "out", "doubles", "floats", "data")
# Options of mallopt(3) by the variables with which a user sets them: the size from which memory is
# a mapping of its own, and how much free memory at the end of the heap is kept.
MALLOC_OPTIONS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
KEPT_BYTES = 1 << 28


def contiguous_tokens(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor `(b, t, …)` as kernels read a `strided` field, copied only where that is necessary.

    Such tensors may be parts of one tensor.
    """
    wide = tensor.to(dtype)
    return wide if wide[0, 0].is_contiguous() else wide.contiguous()


@cache
def library() -> ctypes.CDLL | None:
    """The kernels for this machine; None if there are none, or if they do not fit the sources."""
    loaded = _loaded()
    if loaded is None or not _is_current(loaded):
        return None
    _keep_memory()
    return loaded


def missing() -> str | None:
    """Why the kernels cannot run, and what to do; None if they can."""
    if torch.compiler.is_compiling():  # which cannot trace how they are loaded either
        return "torch.compile does not know the C++ kernels: call the model without it"
    if library() is not None:
        return None
    if _loaded() is not None:
        return (
            "the C++ kernels were compiled from other sources than these: compile them again with "
            "`pip install -e .` in the checkout"
        )
    return (
        "the C++ kernels were not compiled: install longrnn from its source with a C++ compiler "
        "(Debian: apt install g++)"
    )


def call(kernel: str, dtype: torch.dtype | None, **arguments: Any) -> None:
    """Calls a kernel.

    Args:
        kernel: its name in `signatures.KERNELS`.
        dtype: of its tensors, float32 or float64; None for a kernel without a type.
        arguments: numbers and tensors by the names of the fields; None for a null pointer.

    Raises:
        MemoryError: for its intermediate values.
    """
    if not _function(kernel, dtype)(pack(signatures.KERNELS[kernel], dtype, **arguments)):
        raise MemoryError(f"not enough memory for the C++ kernel {kernel}")


def pack(struct: str, dtype: torch.dtype | None, **arguments: Any) -> bytes:
    """A struct of `signatures.STRUCTS` in memory; see `call`."""
    layout, fields = _layout(struct, dtype)
    values: list[Any] = []
    for kind, name, is_optional in fields:
        value: Any = arguments.get(name) if is_optional else arguments[name]
        if kind == "mixed":
            narrow = value is not None and value.dtype == torch.bfloat16
            values += (0 if value is None else value.data_ptr(), narrow)
        elif kind == "strided":
            values += (value.data_ptr(), *value.stride()[:2])
        elif kind in POINTERS:
            values.append(0 if value is None else value.data_ptr())
        else:
            values.append(0 if value is None else value)
    return layout.pack(*values)


def _keep_memory() -> None:
    """Makes glibc keep freed memory for the next call.

    Otherwise it returns the memory of large tensors to the operating system, which clears every
    page of new memory. Whether it does depends on the layout of the heap: some processes took up to
    1.6 times as long as others to read the same prompt.
    """
    for variable, option in MALLOC_OPTIONS.items():
        if platform.libc_ver()[0] == "glibc" and variable not in environ:
            ctypes.CDLL(None).mallopt(option, KEPT_BYTES)


@cache
def _function(kernel: str, dtype: torch.dtype | None) -> Callable[[bytes], int]:
    loaded = library()
    assert loaded is not None, missing()
    function = getattr(loaded, f"longrnn_{kernel}{'' if dtype is None else TYPE_SUFFIXES[dtype]}")
    function.argtypes = [ctypes.c_char_p]
    return function


@cache
def _layout(struct: str, dtype: torch.dtype | None) -> tuple[Struct, list[tuple[str, str, bool]]]:
    fields = list(_flat(struct))
    letters = {"long": "l", "double": "d", "mixed": "Pl", "strided": "Pll"}
    letters |= dict.fromkeys(POINTERS, "P")
    letters["real"] = "f" if dtype is None else REALS[dtype]
    return Struct("@" + "".join(letters[kind] for kind, *_ in fields)), fields


def _flat(struct: str) -> Iterator[tuple[str, str, bool]]:
    """(kind, name, whether it may be left out) of the fields, also of a struct inside a struct."""
    for kind, name in signatures.fields(struct):
        if kind in signatures.STRUCTS:
            yield from _flat(kind)
        else:
            yield kind, name.rstrip("?"), name.endswith("?")


@cache
def _loaded() -> ctypes.CDLL | None:
    """The library of the best instruction set; None if there is none that this machine can run."""
    names = list(CAPABILITIES)
    capability = torch.backends.cpu.get_cpu_capability()
    best = names.index(capability) if capability in names else len(names) - 1
    for name in names[best:]:
        for path in sorted(Path(__file__).parent.glob(f"_{CAPABILITIES[name]}.*")):
            if path.suffix in (".so", ".pyd", ".dylib"):
                # torch has loaded the OpenMP library that the kernels need: they share its threads.
                return ctypes.CDLL(str(path))
    return None


def _is_current(loaded: ctypes.CDLL) -> bool:
    """Whether a library was compiled from the sources that lie beside it, if there are any.

    After an update of a checkout, an old library would read arguments of another layout.
    """
    expected = signatures.digest()
    if expected is None:
        return True
    if not hasattr(loaded, "longrnn_sources"):
        return False
    loaded.longrnn_sources.restype = ctypes.c_char_p
    return loaded.longrnn_sources().decode() == expected
