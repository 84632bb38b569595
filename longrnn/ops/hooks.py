"""What code must know that computes modules without calling them."""

from __future__ import annotations

from itertools import repeat

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from longrnn.errors import UserError

_CHANGES = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "forward",
)


def unhooked(*modules: nn.Module) -> bool:
    """Whether no module has hooks or a `forward` of its own, and there are no global hooks.

    Code that computes several modules at once must not run otherwise: hooks observe and change what
    each module computes.
    """
    if torch_module._has_any_global_hook():
        return False
    # Without a loop in Python, because models decode with this check.
    own = list(map(vars, modules))
    return not any(any(map(dict.get, own, repeat(name))) for name in _CHANGES)


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
