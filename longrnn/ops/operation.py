"""Operations, and the list of implementations that each of them has.

An operation is defined in torch, and the implementation `torch`, the last, computes every call.
The others compute some calls faster. Each of them says itself which calls it refuses, and why: the
device, the dtypes, the sizes that its kernel is limited to, a library that is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from longrnn.errors import UserError


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
        name: the backend that a model names: `torch`, `cpu`, `fla` or `mamba_ssm`.
        refusal: (inputs) → why it cannot compute this call, or None if it can.
        run: (inputs) → the results of the operation.
        tolerance: largest error of a result in float32, relative to its largest entry.
    """

    name: str
    refusal: Callable[..., str | None]
    run: Callable[..., Any]
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

    def choose(self, backend: str, *inputs: Any) -> Implementation:
        """The implementation of one call: the first that accepts it.

        Args:
            backend: `auto`, or the name of an implementation. `torch` computes an operation that
                has none of this name.
            inputs: of the call.

        Raises:
            UserError: the named backend cannot compute this call.
        """
        for implementation in self.implementations:
            if backend == "auto" and implementation.refusal(*inputs) is None:
                return implementation
            if backend == implementation.name:
                reason = implementation.refusal(*inputs)
                if reason is not None:
                    raise UserError(
                        f"the backend {backend} cannot compute {self.name} here: {reason}; use "
                        "backend='auto' for another"
                    )
                return implementation
        return self.implementations[-1]

    def bound(self, backend: str) -> Callable[..., Any]:
        """The operation with a backend, as a function of inputs and options."""
        return partial(self, backend)

    def __call__(self, backend: str, *inputs: Any, **options: Any) -> Any:
        """The results of the implementation that `choose` returns; `options` are not limited."""
        return self.choose(backend, *inputs).run(*inputs, **options)
