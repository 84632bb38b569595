"""The meta device in place of a GPU: what would wait for a GPU cannot run on it.

Tensors on the meta device have no values. An operation that reads a value back from the device
raises, and so does a comparison whose result the program branches on. Copies between the CPU and
the device are counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("meta")


class CopyCounter(TorchDispatchMode):
    """Names the operations that copy between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "copy" in str(func):
            tensors = [one for one in tree_leaves((args, found)) if isinstance(one, Tensor)]
            if len({one.device.type for one in tensors}) > 1:
                self.copies.append(str(func))
        return found
