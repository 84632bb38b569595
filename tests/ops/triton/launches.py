"""Counts what a GPU would launch: operations of torch that compute or copy, and Triton kernels.

Kernels run in Triton's interpreter. An operation of torch is counted once, which is exact for the
operations of the forward pass here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Operations without a kernel, beside views.
FREE = ("aten::empty", "aten::detach", "aten::_unsafe_view", "aten::promote_types")


class _Operations(TorchDispatchMode):
    def __init__(self, names: Counter[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(FREE):
            self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], object]) -> Counter[str]:
    """The names of all launches of `run()` and their number."""
    from triton.runtime import interpreter

    names: Counter[str] = Counter()
    plain = interpreter.InterpretedFunction.run

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        names[self.fn.__name__] += 1
        with _disable_current_modes():
            return plain(self, *args, **named)

    with pytest.MonkeyPatch.context() as patch, _Operations(names):
        patch.setattr(interpreter.InterpretedFunction, "run", counted)
        run()
    return names
