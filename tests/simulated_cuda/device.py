"""What the simulated device is doing: its graph, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.simulated_cuda.trees import leaves_of

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Graph:
    """The operations of a captured function, which `replay` repeats at their addresses."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def record(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        results = [one for one in leaves_of(found) if isinstance(one, Tensor)]

        def again() -> None:
            new = [one for one in leaves_of(func(*args, **kwargs)) if isinstance(one, Tensor)]
            for old, one in zip(results, new, strict=True):
                if old.data_ptr() != one.data_ptr():
                    old.copy_(one)

        self._calls.append(again)

    def add(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def replay(self) -> None:
        with torch.no_grad():
            for call in self._calls:
                call()


class Device:
    """What the device is doing.

    Attributes:
        graph: which captures operations; None for none.
        inside_ours: whether a function of torch with tensors of the device runs, whose new tensors
            are beside them.
        refuses_to_wait: see `torch.cuda.set_sync_debug_mode`.
        waits: names of the operations for which the CPU waited.
    """

    graph: Graph | None = None
    inside_ours = False
    refuses_to_wait = False
    waits: list[str]

    def __init__(self) -> None:
        self.waits = []

    def wait(self, what: str) -> None:
        """The CPU waits for the device, or may not."""
        self.waits.append(what)
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        if self.refuses_to_wait:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


DEVICE = Device()


class _Stream:
    """Streams run in order."""

    device = CUDA

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, **_: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        DEVICE.wait("Event.synchronize")


_PROPERTIES = SimpleNamespace(
    name="simulated GPU", major=9, minor=0, total_memory=2**37, multi_processor_count=132
)


@contextmanager
def _capturing(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    DEVICE.graph = graph
    try:
        yield
    finally:
        DEVICE.graph = None


def _set_sync_debug_mode(mode: str) -> None:
    DEVICE.refuses_to_wait = mode == "error"


# Functions of `torch.cuda`.
FUNCTIONS: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "synchronize": lambda *_: None,
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda *_: _Stream(),
    "stream": lambda _: nullcontext(),
    "device": lambda _: nullcontext(),
    "CUDAGraph": Graph,
    "graph": _capturing,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "empty_cache": lambda: None,
    "is_bf16_supported": lambda *_, **__: True,
    "get_device_capability": lambda *_: (9, 0),
    "get_device_name": lambda *_: "simulated GPU",
    "get_device_properties": lambda *_: _PROPERTIES,
    "set_device": lambda _: None,
    "reset_peak_memory_stats": lambda *_: None,
    "max_memory_allocated": lambda *_: 2**20,
    "memory_allocated": lambda *_: 2**20,
    "get_rng_state": lambda *_: torch.Generator().get_state(),
    "set_rng_state": lambda *_: None,
    "manual_seed": lambda _: None,
    "manual_seed_all": lambda _: None,
}
