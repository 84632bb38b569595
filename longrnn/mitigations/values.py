"""Options that are one number, one per layer, or one per layer and head."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import Tensor

from longrnn.errors import UserError


def _numbers(holds: Callable[[float], bool], range_in_words: str) -> BeforeValidator:
    """A check that returns floats for numbers, alone or in lists.

    None in a list leaves the layer or head unchanged.

    Args:
        holds: whether a number is in the range; false for NaN.
        range_in_words: for errors.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [None if item is None else check(item) for item in value]
        try:
            # float would accept a bool.
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not holds(number):
            raise UserError(
                f"a number must be {range_in_words}, alone or in lists by layer and head, not "
                f"{value!r}: set another value"
            )
        return number

    return BeforeValidator(check)


AboveZero = Annotated[Any, _numbers(lambda number: number > 0, "above 0")]
FiniteAboveZero = Annotated[
    Any, _numbers(lambda number: 0 < number < math.inf, "above 0 and finite")
]
Finite = Annotated[Any, _numbers(math.isfinite, "finite")]
AtLeastZero = Annotated[Any, _numbers(lambda number: number >= 0, "at least 0")]
Factor = Annotated[Any, _numbers(lambda number: 0 < number <= 1, "above 0 and at most 1")]


def check_sizes(name: str, value: Any, counts: Sequence[int]) -> None:
    """Refuses lists that do not match the layers and heads of a model.

    Args:
        name: of the option, for error messages.
        value: a number, or lists by layer and head.
        counts: number of heads of each layer.

    Raises:
        UserError: another number of layers, or of heads in a layer.
    """
    if not isinstance(value, list):
        return
    if len(value) != len(counts):
        raise UserError(
            f"{name} lists {len(value)} layers and the model has {len(counts)}: give one entry for "
            "each layer"
        )
    for layer, (heads, count) in enumerate(zip(value, counts, strict=True)):
        if isinstance(heads, list) and len(heads) != count:
            raise UserError(
                f"{name} lists {len(heads)} heads for layer {layer}, which has {count}: give one "
                "number for each head"
            )


def per_head(value: Any, layer: int, heads: Tensor, alone: float) -> Tensor:
    """The numbers of the heads of one layer, `(h,)` float64.

    Args:
        value: a number, or lists by layer and head.
        layer: index of the layer.
        heads: which of its heads are changed, `(h,)` bool.
        alone: the number that changes nothing, for the other heads and for None.
    """
    if isinstance(value, list):
        value = value[layer]
    numbers = value if isinstance(value, list) else [value] * len(heads)
    filled = [alone if number is None else number for number in numbers]
    return torch.where(heads, torch.tensor(filled, dtype=torch.float64), alone)
