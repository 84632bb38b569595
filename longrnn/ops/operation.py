"""Operations, and the list of implementations that each of them has.

An operation is defined in torch, and the implementation `torch`, the last, computes every call.
The others compute some calls faster. Each of them says itself which calls it refuses, and why: the
device, the dtypes, the sizes that its kernel is limited to, a library that is not installed. An
operation that consists of others, such as a whole layer, has no implementation in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Any, NamedTuple

from longrnn.errors import UserError


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
        name: the backend that a model names: `torch`, `cpu`, `fla` or `mamba_ssm`.
        refusal: (inputs) → why it cannot compute this call, or None if it can.
        run: (inputs) → the results of the operation.
        serves: the demands that it meets beside the plain operation: stages of an `Edit`, and what
            else the caller names. It is not given calls with others.
        tolerance: largest error of a result in float32, relative to its largest entry.
    """

    name: str
    refusal: Callable[..., str | None]
    run: Callable[..., Any]
    serves: frozenset[str] = frozenset()
    tolerance: float = 1e-4


def accepts(*inputs: Any) -> None:
    """The refusal of an implementation that computes every call."""


class Operation(NamedTuple):
    """An operation of a layer.

    Attributes:
        name: as an error says it.
        implementations: in the order in which `auto` tries them.
        limited: of a recurrence: the same with a limit of each head's norm, as one more input.
        windowed: of a recurrence: the same over the last tokens; see `longrnn.ops.scan.window`.
    """

    name: str
    implementations: list[Implementation]
    limited: Operation | None = None
    windowed: Operation | None = None

    def choose(
        self, backend: str, *inputs: Any, demands: Set[str] = frozenset()
    ) -> Implementation | None:
        """The implementation of one call.

        Args:
            backend: `auto`, or the name of implementations. `torch` computes an operation that has
                none of this name.
            inputs: of the call.
            demands: what the call needs beside the plain operation; see `Implementation.serves`.

        Returns:
            The first that accepts the call. None only where the operation has no implementation in
            torch, that is, where the call can also be computed as several operations.

        Raises:
            UserError: the named backend cannot compute this call.
        """
        for implementation in self.implementations:
            if backend == "auto":
                serves = demands <= implementation.serves
                if serves and implementation.refusal(*inputs) is None:
                    return implementation
            elif backend == implementation.name:
                reason = implementation.refusal(*inputs)
                if reason is not None:
                    raise UserError(
                        f"the backend {backend} cannot compute {self.name} here: {reason}; use "
                        "backend='auto' for another"
                    )
                if demands <= implementation.serves:
                    return implementation
        last = self.implementations[-1]
        return last if last.name == "torch" and demands <= last.serves else None

    def bound(self, backend: str) -> Callable[..., Any]:
        """The operation with a backend, as a function of inputs and options."""
        return partial(self, backend)

    def __call__(self, backend: str, *inputs: Any, **options: Any) -> Any:
        """The results of the implementation that `choose` returns; `options` are not limited."""
        implementation = self.choose(backend, *inputs)
        assert implementation is not None, f"{self.name} has no implementation in torch"
        return implementation.run(*inputs, **options)
