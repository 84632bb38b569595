"""A CUDA device that exists in Python only: tensors that say that they are on a GPU.

`simulated()` is a context in which tensors can be moved to `cuda`. Their values lie on the CPU and
are computed there, and each operation is checked as a GPU would:

- tensors of both devices in one operation raise, with the exceptions that torch allows;
- what waits for the device (a value read back, a mask whose size decides that of a result) is
  recorded, and raises under `torch.cuda.set_sync_debug_mode("error")` and in a CUDA graph;
- a CUDA graph records its operations and repeats them at the same addresses, with the numbers that
  Python computed at the capture;
- a Triton kernel that is given a tensor on the CPU raises.

Not simulated: streams run in order, memory is that of the CPU, and kernels run in Triton's
interpreter, where it is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from longrnn.ops import triton as kernels
from longrnn.ops.ssd import BACKENDS
from tests.simulated_cuda.device import CPU, CUDA, DEVICE, FUNCTIONS
from tests.simulated_cuda.tensors import Functions, Operations, inner, is_on_gpu
from tests.simulated_cuda.trees import leaves_of, mapped

__all__ = ["simulated", "waits"]


class _Autocast(torch.autocast):
    """To torch, our tensors are on the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(_on_cpu(device_type), *args, **kwargs)


def _on_cpu(kind: str) -> str:
    return "cpu" if kind == "cuda" else kind


class _Generator(torch.Generator):
    """A generator of the simulated device draws the numbers of a CPU."""

    wanted: str

    def __new__(cls, device: Any = "cpu") -> _Generator:
        found = super().__new__(cls, CPU)  # type: ignore[call-arg]
        found.wanted = torch.device(device).type
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA if self.wanted == "cuda" else CPU


def _suits(tensors: Any) -> bool:
    given = [one for one in tensors if one is not None]
    return all(map(is_on_gpu, given)) and not kernels.is_transformed()


def _launcher(call: Any) -> Any:
    """`GridExecutor.__call__` with the checks of a GPU."""

    def launch(self: Any, *args: Any, **named: Any) -> None:
        tensors = [one for one in leaves_of((args, named)) if isinstance(one, Tensor)]
        if not all(map(is_on_gpu, tensors)):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        plain_args, plain_named = mapped(inner, (args, named))
        run = partial(call, self, *plain_args, **plain_named)
        # Inside a kernel, the interpreter's own tensors are on no device.
        with _disable_current_modes():
            run()
        if DEVICE.graph is not None:
            DEVICE.graph.add(run)

    return launch


def _mover(plain: Any) -> Any:
    """`Module._apply`, which keeps its parameters and gives them the class of our tensors."""

    def apply(self: nn.Module, *args: Any, **named: Any) -> nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return plain(self, *args, **named)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply


@contextmanager
def waits() -> Iterator[list[str]]:
    """What waits for the device inside the context."""
    DEVICE.waits = found = []
    yield found


@contextmanager
def simulated(*, fused: bool = True) -> Iterator[None]:
    """Tensors can be moved to `cuda` inside.

    Args:
        fused: with Triton's kernels in the interpreter; otherwise as where Triton is missing.
    """
    with ExitStack() as stack:
        for name, value in FUNCTIONS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            plain = getattr(torch, name)
            ours = lambda kind="cuda", plain=plain: plain(_on_cpu(kind))  # noqa: E731
            stack.enter_context(mock.patch.object(torch, name, ours))
        stack.enter_context(mock.patch.object(torch, "autocast", _Autocast))
        # Modes belong to a thread, and batches are pinned by another one.
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda self: self))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(kernels, "suits", _suits))
        if fused:
            from triton.runtime.interpreter import GridExecutor

            launch = _launcher(GridExecutor.__call__)
            stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
        else:
            why = "Triton is not installed: pip install triton"
            stack.enter_context(mock.patch.object(kernels, "missing", return_value=why))
            others = {name: ssd for name, ssd in BACKENDS.items() if name != "triton"}
            stack.enter_context(mock.patch.dict(BACKENDS, others, clear=True))
        torch._C._set_only_lift_cpu_tensors(True)  # so that modes see `torch.tensor(…, device=…)`
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _mover(nn.Module._apply)))
        stack.enter_context(Functions())
        stack.enter_context(Operations())
        yield
