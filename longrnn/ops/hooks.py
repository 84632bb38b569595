"""What code must know that computes modules without calling them."""

from __future__ import annotations

from torch import Tensor, nn

from longrnn.errors import UserError


def own_weight(module: nn.Module) -> Tensor:
    """The weight of a module that is computed without calling it.

    Raises:
        UserError: an adapter of PEFT took its place, which only a call computes.
    """
    if "base_layer" in module._modules:
        raise UserError(
            "an adapter of the head, of a convolution or of a norm would have no effect, because "
            "longrnn reads their weights without calling them: give the adapter other "
            "target_modules, for example in_proj and out_proj"
        )
    return module.weight  # type: ignore[return-value]
