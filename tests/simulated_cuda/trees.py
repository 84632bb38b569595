"""Arguments and results of operations as trees; faster than torch's functions for these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the leaves of lists, tuples and dictionaries."""
    if isinstance(value, (list, tuple)):
        parts = [mapped(function, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: mapped(function, one) for name, one in value.items()}
    return function(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of lists, tuples and dictionaries."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves_of(one)
    elif isinstance(value, dict):
        yield from leaves_of(list(value.values()))
    else:
        yield value
