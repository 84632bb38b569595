"""Options that may be one number, one per layer, or one per layer and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.errors import UserError


def check_values(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """Checks every number in a nested list (None means: leave this layer or head alone).

    Args:
        name: of the option, for errors.
        value: a number, a list of numbers or None per layer, or a list of such lists.
        above: every number is above this one.
        least: every number is at least this one.
        most: every number is at most this one.
        below: every number is below this one.
    """
    if isinstance(value, list):

        def check(item: Any) -> Any:
            return check_values(name, item, above=above, least=least, most=most, below=below)

        return [item if item is None else check(item) for item in value]
    try:
        if isinstance(value, bool):
            raise TypeError("float takes it for a number")
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} takes a number, or lists by layer and head, not {value!r}"
        ) from error
    limits = [
        (above is not None and not number > above, f"above {above}"),
        (least is not None and not number >= least, f"at least {least}"),
        (most is not None and not number <= most, f"at most {most}"),
        (below is not None and not number < below, f"below {below}"),
        (number != number, "a number"),
    ]
    for broken, limit in limits:
        if broken:
            raise UserError(f"{name} must be {limit}, not {value}")
    return number


def of_layer(
    name: str, value: Any, layer: int, n_layers: int, mask: Tensor, alone: float
) -> Tensor:
    """The values of one layer's heads, `(h,)` float64.

    Args:
        name: of the option, for errors.
        value: as `check_values` gave it.
        layer: which.
        n_layers: of the model.
        mask: heads that the mitigation changes, `(h,)`.
        alone: the value that changes nothing, for the other heads and for None.
    """
    if isinstance(value, list):
        if len(value) != n_layers:
            raise UserError(f"{name} lists {len(value)} layers, the model has {n_layers}")
        value = value[layer]
    heads = value if isinstance(value, list) else [value] * len(mask)
    if len(heads) != len(mask):
        raise UserError(f"{name} lists {len(heads)} heads for layer {layer}, which has {len(mask)}")
    filled = torch.tensor([alone if head is None else head for head in heads], dtype=torch.float64)
    return torch.where(mask, filled, alone)
