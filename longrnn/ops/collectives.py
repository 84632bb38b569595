"""Exchanges between the processes of a context group, with gradients.

Each process of a group holds a consecutive share of every row. A value that passes from one share
to another passes from one process to another in the forward pass, and its gradient takes the way
back in the backward pass. Every exchange here is a step of both.

Notable choices:
- All processes of a group must exchange in the same order, in the backward pass too, although each
  has a graph of its own. So every exchange takes and returns a *flow*: a number without content
  whose gradients make each exchange of the backward pass wait for those that came after it in the
  forward pass, and which keeps every exchange in the graph of every process.
- Where the forward pass runs again in the backward pass (gradient checkpointing), nothing is
  exchanged again: a `Record` keeps what was received. In the backward pass the process before would
  be waiting for a gradient, and would not send.
- Tensors of any dtypes are sent as one message of bytes: values arrive bit by bit.
- torch.distributed is imported on first use: one process needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrnn.state import leaves, unflatten

S = TypeVar("S")
T = TypeVar("T")
# Bytes to which the parts of a message are aligned, the size of the widest dtype.
ALIGNED = 8


class Record:
    """What a part of the forward pass has received, for when that part runs again."""

    def __init__(self) -> None:
        self._received: list[Any] = []
        self._next = 0

    def begin(self) -> None:
        """Begins the part, for the first time or again."""
        self._next = 0

    def take(self, exchange: Callable[[], T]) -> T:
        """The result of the next exchange, which takes place the first time only."""
        if self._next == len(self._received):
            self._received.append(exchange())
        self._next += 1
        return self._received[self._next - 1]


@dataclass(frozen=True)
class ContextGroup:
    """The processes that hold consecutive shares of the same rows, in the order of the shares.

    Attributes:
        handle: the process group of torch.distributed; None for all processes.
        rank: index of this process in the group, which is that of its share.
        size: number of processes.
        record: of a part of the forward pass that may run again; None if it does not.
    """

    handle: Any
    rank: int
    size: int
    record: Record | None = None

    @classmethod
    def of(cls, handle: Any = None) -> ContextGroup:
        """The group of a `torch.distributed.ProcessGroup`; None for all processes."""
        import torch.distributed as dist

        return cls(handle, dist.get_rank(handle), dist.get_world_size(handle))

    @property
    def is_first(self) -> bool:
        """Whether this process holds the first share."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process holds the last share."""
        return self.rank == self.size - 1

    def once(self, exchange: Callable[[], T]) -> T:
        """The result of an exchange of the forward pass; see `Record`."""
        return exchange() if self.record is None else self.record.take(exchange)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, stacked in a new first axis; without gradient."""
        import torch.distributed as dist

        given = tensor.detach().contiguous()
        found = [torch.empty_like(given) for _ in range(self.size)]
        dist.all_gather(found, given, group=self.handle)
        return torch.stack(found)

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return rank if self.handle is None else dist.get_global_rank(self.handle, rank)

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        import torch.distributed as dist

        dist.send(_packed(tensors), self._global(to), group=self.handle)

    def _receive(self, like: Sequence[Tensor], sender: int) -> list[Tensor]:
        import torch.distributed as dist

        message = _packed(like)
        dist.recv(message, self._global(sender), group=self.handle)
        return _unpacked(message, like)

    def _from_last(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch.distributed as dist

        message = _packed(tensors)
        dist.broadcast(message, self._global(self.size - 1), group=self.handle)
        return _unpacked(message, tensors)

    def _sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum of each tensor over the processes; one exchange per dtype."""
        import torch.distributed as dist

        found: dict[int, Tensor] = {}
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            whole = torch.cat([tensors[i].reshape(-1) for i in indices])
            dist.all_reduce(whole, group=self.handle)
            parts = whole.split([tensors[i].numel() for i in indices])
            found |= {i: part.view_as(tensors[i]) for i, part in zip(indices, parts, strict=True)}
        return [found[i] for i in range(len(tensors))]


def begin(tree: Any) -> Tensor:
    """A new flow, whose gradient reaches the exchanges that the tensors of a tree came from.

    Args:
        tree: the state with which a call begins; that of an earlier call makes the backward pass
            of this call come before that of the earlier one.
    """
    given = [leaf for _, leaf in leaves(tree)]
    for leaf in given:
        if leaf.requires_grad:
            return leaf.reshape(-1)[:0].sum()
    grad = torch.is_grad_enabled()
    return torch.zeros((), device=given[0].device if given else None, requires_grad=grad)


def end(flow: Tensor, x: Tensor) -> Tensor:
    """The same tensor, whose gradient makes the exchanges of the flow run in the backward pass."""
    return _End.apply(flow, x)


def gather(group: ContextGroup, flow: Tensor, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The tensors of all processes.

    Args:
        group: all its processes call this.
        flow: of the last exchange.
        tensors: of the same shapes and floating-point dtypes in every process.

    Returns:
        The flow, and each tensor with a new first axis over the processes.
    """
    flow, *found = _Gather.apply(group, flow, *tensors)
    return flow, found


def receive(group: ContextGroup, flow: Tensor, tree: S) -> tuple[Tensor, S]:
    """The tree that the process of the previous share sends; that of the first share gets `tree`.

    Args:
        group: the process before calls `send`.
        flow: of the last exchange.
        tree: in the other processes only its shapes and dtypes are used.
    """
    given = [leaf for _, leaf in leaves(tree)]
    whole = [leaf for leaf in given if not leaf.is_floating_point()]
    if whole and not group.is_first:
        values = iter(group.once(lambda: group._receive(whole, group.rank - 1)))
        given = [leaf if leaf.is_floating_point() else next(values) for leaf in given]
    floats = [leaf for leaf in given if leaf.is_floating_point()]
    flow, *found = _Receive.apply(group, flow, *floats)
    values = iter(found)
    return flow, unflatten(
        tree, [next(values) if leaf.is_floating_point() else leaf for leaf in given]
    )


def send(group: ContextGroup, flow: Tensor, tree: Any) -> Tensor:
    """Sends a tree to the process of the next share, which calls `receive`; returns the flow."""
    given = [leaf for _, leaf in leaves(tree)]
    whole = [leaf for leaf in given if not leaf.is_floating_point()]
    if whole and not group.is_last:
        group.once(lambda: group._send(whole, group.rank + 1))
    return _Send.apply(group, flow, *(leaf for leaf in given if leaf.is_floating_point()))


def from_last(group: ContextGroup, flow: Tensor, tree: S) -> tuple[Tensor, S]:
    """The tree of the process of the last share, in all processes; returns the flow and the tree.

    Args:
        group: all its processes call this.
        flow: of the last exchange.
        tree: of the same shapes and dtypes in every process.
    """
    given = [leaf for _, leaf in leaves(tree)]
    flow, *found = _FromLast.apply(group, flow, *given)
    return flow, unflatten(tree, found)


class _End(torch.autograd.Function):
    """See `end`."""

    @staticmethod
    def forward(ctx: Any, flow: Tensor, x: Tensor) -> Tensor:
        ctx.like = flow.dtype, flow.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        dtype, device = ctx.like
        return torch.zeros((), dtype=dtype, device=device), grad


class _Gather(torch.autograd.Function):
    """See `gather`. The gradient of a tensor is the sum of those that the processes have for it."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, flow: Tensor, *tensors: Tensor) -> Any:
        ctx.group = group
        found = group.once(lambda: [group.gather(tensor) for tensor in tensors])
        return flow.clone(), *(tensor.clone() for tensor in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_flow: Tensor, *grads: Tensor) -> Any:  # type: ignore[override]
        summed = ctx.group._sums(grads)
        return None, grad_flow, *(grad[ctx.group.rank] for grad in summed)


class _Receive(torch.autograd.Function):
    """See `receive`. The gradient is sent to the process before."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, flow: Tensor, *tensors: Tensor) -> Any:
        ctx.group = group
        if group.is_first:
            return flow.clone(), *(tensor.view_as(tensor) for tensor in tensors)
        found = group.once(lambda: group._receive(tensors, group.rank - 1))
        return flow.clone(), *(tensor.clone() for tensor in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_flow: Tensor, *grads: Tensor) -> Any:  # type: ignore[override]
        if ctx.group.is_first:
            return None, grad_flow, *grads
        ctx.group._send(grads, ctx.group.rank - 1)
        return None, grad_flow, *(None for _ in grads)


class _Send(torch.autograd.Function):
    """See `send`. The gradient comes from the process after."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, flow: Tensor, *tensors: Tensor) -> Tensor:
        ctx.group = group
        ctx.like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        ctx.device = flow.device if not tensors else tensors[0].device
        if not group.is_last:
            group.once(lambda: group._send(tensors, group.rank + 1))
        return flow.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_flow: Tensor) -> Any:  # type: ignore[override]
        if ctx.group.is_last:
            return None, grad_flow, *(None for _ in ctx.like)
        like = [torch.empty_like(tensor, device=ctx.device) for tensor in ctx.like]
        return None, grad_flow, *ctx.group._receive(like, ctx.group.rank + 1)


class _FromLast(torch.autograd.Function):
    """See `from_last`. The gradients of all processes are those of the tensors of the last."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, flow: Tensor, *tensors: Tensor) -> Any:
        ctx.group = group
        # Never in a part that runs again. Copies, because FSDP warns of outputs that are views.
        found = [tensor.clone() for tensor in group._from_last(tensors)]
        ctx.mark_non_differentiable(*(one for one in found if not one.is_floating_point()))
        ctx.floats = [one.is_floating_point() for one in found]
        return flow.clone(), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_flow: Tensor, *grads: Tensor) -> Any:  # type: ignore[override]
        wanted = [grad for grad, is_float in zip(grads, ctx.floats, strict=True) if is_float]
        summed = iter(ctx.group._sums(wanted))
        own = [next(summed) if is_float else None for is_float in ctx.floats]
        return None, grad_flow, *(own if ctx.group.is_last else (None for _ in own))


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, each aligned."""
    parts = []
    for tensor in tensors:
        own = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(torch.nn.functional.pad(own, (0, -len(own) % ALIGNED)))
    return torch.cat(parts)


def _unpacked(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose bytes `_packed` has put together."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    parts = message.split([size + -size % ALIGNED for size in sizes])
    return [
        part[:size].view(tensor.dtype).view(tensor.shape)
        for part, size, tensor in zip(parts, sizes, like, strict=True)
    ]
