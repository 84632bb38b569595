"""Operations, and the list of implementations that each of them has.

An operation is defined in torch: its last implementation, `torch`, computes every call. The others
compute some calls faster. Each of them says itself which calls it refuses, and why: the device, the
dtypes, the sizes that its kernel is limited to, gradients, a library that is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from longrnn.errors import UserError, nearest


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
        name: the backend that a model names: `torch`, `cpu`, `fla` or `mamba_ssm`.
        refusal: (inputs) → why it cannot compute this call, or None if it can.
        run: (inputs) → the results of the operation.
        stages: the stages of an `Edit` that it computes; it is not given calls with others.
    """

    name: str
    refusal: Callable[..., str | None]
    run: Callable[..., Any]
    stages: frozenset[str] = frozenset()


class Operation(NamedTuple):
    """An operation of a layer.

    Attributes:
        name: as an error says it.
        implementations: in the order in which `auto` tries them.
        limited: the same recurrence with a limit of each head's norm.
    """

    name: str
    implementations: tuple[Implementation, ...]
    limited: Operation | None = None

    def choose(
        self, backend: str, *inputs: Any, stages: frozenset[str] = frozenset()
    ) -> Implementation | None:
        """The implementation of one call.

        Args:
            backend: `auto`, or the name of implementations. `torch` computes an operation that has
                none of this name.
            inputs: of the call.
            stages: the stages of an `Edit` that the call needs.

        Returns:
            The first that accepts the call. None only where the operation has no implementation in
            torch, that is, where the call can also be computed as several operations.

        Raises:
            UserError: the named backend cannot compute this call.
        """
        for implementation in self.implementations:
            if backend == "auto":
                knows = stages <= implementation.stages
                if knows and implementation.refusal(*inputs) is None:
                    return implementation
            elif backend == implementation.name:
                reason = implementation.refusal(*inputs)
                if reason is not None:
                    raise UserError(
                        f"the backend {backend} cannot compute {self.name} here: {reason}; use "
                        "backend='auto' for another one"
                    )
                if stages <= implementation.stages:
                    return implementation
        last = self.implementations[-1]
        return last if last.name == "torch" else None

    def __call__(self, backend: str, *inputs: Any, **options: Any) -> Any:
        """The results of the implementation that `choose` returns; `options` are not limited."""
        implementation = self.choose(backend, *inputs)
        assert implementation is not None, f"{self.name} has no implementation in torch"
        return implementation.run(*inputs, **options)


def check_backend(backend: str, operations: Sequence[Operation]) -> None:
    """Raises a `UserError` for a backend that implements none of a cell's operations."""
    names = ["auto", *dict.fromkeys(one.name for op in operations for one in op.implementations)]
    if backend not in names:
        raise UserError(f"this cell has no backend {backend!r}: {nearest(backend, names)}")
