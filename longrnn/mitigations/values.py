"""Options that are one number, one per layer, or one per layer and head.

Lists are stored as tuples, so that the options of a mitigation are hashable.
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
    """The range of an option; None where there is no bound.

    Attributes:
        above: lower bound, excluded.
        least: lower bound, included.
        most: upper bound, included.
        below: upper bound, excluded.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None

    def check(self, name: str, value: Any) -> Any:
        """Returns `value` with floats for numbers and tuples for lists.

        Args:
            name: of the option, for error messages.
            value: a number, a list by layer, or lists by layer and head; None in a list leaves the
                layer or head unchanged.

        Raises:
            UserError: a value that is not a number, or out of range.
        """
        if isinstance(value, list | tuple):
            return tuple(None if item is None else self.check(name, item) for item in value)
        try:
            if isinstance(value, bool):
                raise TypeError("float would accept a bool")
            number = float(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name} must be a number, or lists by layer and head, not {value!r}: "
                "write such as 0.5"
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
                raise UserError(f"{name} must be {limit}, not {value}: set another value")
        return number


def check_sizes(name: str, value: Any, counts: Sequence[int]) -> None:
    """Refuses lists that do not match the layers and heads of a model.

    Args:
        name: of the option, for error messages.
        value: from `Range.check`.
        counts: number of heads of each layer.

    Raises:
        UserError: another number of layers, or of heads in a layer.
    """
    if not isinstance(value, tuple):
        return
    if len(value) != len(counts):
        raise UserError(
            f"{name} lists {len(value)} layers and the model has {len(counts)}: give one entry for "
            "each layer"
        )
    for layer, (heads, count) in enumerate(zip(value, counts, strict=True)):
        if isinstance(heads, tuple) and len(heads) != count:
            raise UserError(
                f"{name} lists {len(heads)} heads for layer {layer}, which has {count}: give one "
                "number for each head"
            )


def per_head(value: Any, layer: int, heads: Tensor, alone: float) -> Tensor:
    """The numbers of the heads of one layer, `(h,)` float64.

    Args:
        value: from `Range.check`.
        layer: index of the layer.
        heads: which of its heads are changed, `(h,)` bool.
        alone: the number that changes nothing, for the other heads and for None.
    """
    if isinstance(value, tuple):
        value = value[layer]
    numbers = value if isinstance(value, tuple) else [value] * len(heads)
    filled = torch.tensor([alone if one is None else one for one in numbers], dtype=torch.float64)
    return torch.where(heads, filled, alone)


class Constant:
    """A tensor that never changes, copied to each device once.

    A copy in every call would wait for the device.

    Args:
        value: on the CPU; it must not be changed afterwards.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __repr__(self) -> str:
        return f"Constant({self.value.tolist()})"

    def __reduce__(self) -> tuple[type[Constant], tuple[Tensor]]:
        return type(self), (self.value,)

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The value on a device, in its own dtype or in another one."""
        key = device, self.value.dtype if dtype is None else dtype
        if key not in self._copies:
            # Not an inference tensor: a later call may need gradients.
            with torch.inference_mode(False):
                self._copies[key] = self.value.to(*key)
        return self._copies[key]

    def like(self, tensor: Tensor) -> Tensor:
        """The value on the device and in the dtype of a tensor."""
        return self.on(tensor.device, tensor.dtype)


def listed(value: Any) -> Any:
    """Converts tuples to lists, as they are written in a spec."""
    return [listed(item) for item in value] if isinstance(value, tuple) else value


def frozen(value: Any) -> Any:
    """Converts lists to tuples."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value
