"""Options that may be one number, one per layer, or one per layer and head.

Lists are kept as tuples, so that the options of a mitigation are a frozen value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longrnn.errors import UserError


@dataclass(frozen=True)
class Range:
    """The numbers that an option takes; None where there is no bound.

    Attributes:
        above: every number is above this one.
        least: every number is at least this one.
        most: every number is at most this one.
        below: every number is below this one.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None

    def check(self, name: str, value: Any) -> Any:
        """`value` with floats for numbers and tuples for lists.

        Args:
            name: of the option, for errors.
            value: a number, a list by layer of numbers or None (leave this layer or head alone),
                or a list of such lists.

        Raises:
            UserError: not a number, or one out of range.
        """
        if isinstance(value, list | tuple):
            return tuple(None if item is None else self.check(name, item) for item in value)
        try:
            if isinstance(value, bool):
                raise TypeError("float takes it for a number")
            number = float(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name} takes a number, or lists by layer and head, not {value!r}"
            ) from error
        limits = [
            (self.above is not None and not number > self.above, f"above {self.above}"),
            (self.least is not None and not number >= self.least, f"at least {self.least}"),
            (self.most is not None and not number <= self.most, f"at most {self.most}"),
            (self.below is not None and not number < self.below, f"below {self.below}"),
            (number != number, "a number"),
        ]
        for broken, limit in limits:
            if broken:
                raise UserError(f"{name} must be {limit}, not {value}")
        return number


def check_sizes(name: str, value: Any, counts: Sequence[int]) -> None:
    """Refuses a list that does not fit the model.

    Args:
        name: of the option.
        value: as `Range.check` gave it.
        counts: heads of each layer.

    Raises:
        UserError: it has another number of layers, or of heads in one of them.
    """
    if not isinstance(value, tuple):
        return
    if len(value) != len(counts):
        raise UserError(f"{name} lists {len(value)} layers, the model has {len(counts)}")
    for layer, (heads, count) in enumerate(zip(value, counts, strict=True)):
        if isinstance(heads, tuple) and len(heads) != count:
            raise UserError(f"{name} lists {len(heads)} heads for layer {layer}, which has {count}")


def per_head(value: Any, layer: int, heads: Tensor, alone: float) -> Tensor:
    """The numbers of one layer's heads, `(h,)` float64.

    Args:
        value: as `Range.check` gave it.
        layer: which.
        heads: which of its heads a mitigation changes, `(h,)` bool.
        alone: the number that changes nothing, for the other heads and for None.
    """
    if isinstance(value, tuple):
        value = value[layer]
    numbers = value if isinstance(value, tuple) else [value] * len(heads)
    filled = torch.tensor([alone if one is None else one for one in numbers], dtype=torch.float64)
    return torch.where(heads, filled, alone)


def listed(value: Any) -> Any:
    """A value with lists for tuples, as it is written in a spec."""
    return [listed(item) for item in value] if isinstance(value, tuple) else value


def frozen(value: Any) -> Any:
    """A value with tuples for lists."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value
