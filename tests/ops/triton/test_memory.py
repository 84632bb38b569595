"""The memory of the backward pass of the Triton kernels, counted on tensors without values."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from longrnn.ops.triton import limited_gradient, recurrence, recurrence_gradient
from longrnn.ops.triton.device import ONE

# One layer of Mamba-2 2.7B: heads, channels per head, numbers of state per channel.
H, P, N = 80, 64, 128


class _Idle:
    """Stands for a kernel, and runs nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **named: None


class Living(TorchDispatchMode):
    """Counts the bytes of the tensors that are in use at a time.

    Attributes:
        most: bytes of those that were created in the context, at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most, self._now = 0, 0
        self._tensors: Counter[int] = Counter()  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor, given)
        return result

    def _count(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._tensors:
            if key in given:
                return  # a view of a tensor from outside
            self._now += size
            self.most = max(self.most, self._now)
        self._tensors[key] += 1
        weakref.finalize(tensor, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._tensors[key] -= 1
        if self._tensors[key] == 0:
            del self._tensors[key]
            self._now -= size


def idle(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Replaces the kernels that modules call."""
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, (JITFunction, InterpretedFunction)):
                monkeypatch.setattr(module, name, _Idle())


def backward_bytes(rows: int, time: int, *, limited: bool) -> int:
    """Bytes at a time in the backward pass, without the gradients and states between segments."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device="meta")

    x, B = (empty(time, *of, dtype=torch.bfloat16) for of in ((H, P), (1, N)))
    state = empty(H, P, N)
    given = recurrence.Operands(x, empty(time, H), empty(time, H), B, B, state)
    how = recurrence.Plan(ONE.value, 64, 2048, time // 2048)
    before = torch.empty(how.segments, *state.shape, device="meta")
    grad_y, scales = empty(time, H, P), empty(time, H)
    with Living() as memory:
        if limited:
            found = limited_gradient.backward(given, how, scales, before, grad_y, state)
        else:
            found = recurrence_gradient.backward(given, how, before, grad_y, state)
    # The gradients of B and C are found for 16 heads each, and then added up.
    parts = 2 * rows * time * (H // 16) * N * 4
    states = 0 if limited else before.nbytes  # the gradients of the states after segments
    return memory.most - sum(one.nbytes for one in found) - parts - states


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_backward_pass_keeps_states_of_chunks_for_some_segments_at_a_time(
    rows: int, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside gradients and the states between segments, memory does not grow with the length.

    A limit on the norm of the state adds five numbers per head and token.
    """
    idle(monkeypatch, recurrence, recurrence_gradient, limited_gradient)
    more = []
    for time in (65_536, 1_048_576):
        numbers = 5 * 4 * rows * time * H if limited else 0
        more.append(backward_bytes(rows, time, limited=limited) - numbers)
    one = 32 * rows * H * P * N * 2  # states of the chunks of one segment
    assert one < more[0] <= 2 * recurrence_gradient.BYTES_AT_ONCE + 2 * one
    assert more[1] <= 1.01 * more[0]
