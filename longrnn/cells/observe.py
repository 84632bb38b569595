"""Observes the recurrences of a model by forward hooks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from longrnn.cells.base import Cell
from longrnn.cells.edit import Update


@contextmanager
def watch(modules: Sequence[nn.Module], see: Callable[..., None]) -> Iterator[None]:
    """A context in which `see` gets the index of a module and its arguments at every call."""

    def hook(index: int, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        see(index, *args)

    with ExitStack() as hooks:
        for index, module in enumerate(modules):
            hooks.callback(module.register_forward_hook(partial(hook, index)).remove)
        yield


@contextmanager
def with_hooks(module: nn.Module, hooks: dict[int, Callable[..., Any]]) -> Iterator[None]:
    """A context in which a module has these forward hooks.

    For the computation in a backward pass, at which those of the forward pass have been removed.
    """
    before, module._forward_hooks = module._forward_hooks, hooks
    try:
        yield
    finally:
        module._forward_hooks = before


@contextmanager
def decay_sums(cells: Sequence[Cell]) -> Iterator[dict[int, Tensor]]:
    """A context in which the log decays of each cell are summed over all tokens.

    The sums are by index of the cell; a cell without decays has none. They are `(b, h, 1)` by head,
    `(b, h, n)` by key or `(b, 1, d)` by unit, and float64, because a float32 sum over a million
    tokens has lost its digits.
    """
    sums: dict[int, Tensor] = {}

    def add(index: int, seen: Any, *_: Any) -> None:
        if not isinstance(seen, Update):
            log_decay = seen.decay.total()
        elif seen.keep is not None:
            log_decay = seen.keep.double().log()[:, None]
        else:
            return
        sums[index] = sums.get(index, 0) + log_decay

    with watch([cell.recurrence for cell in cells], add):
        yield sums
