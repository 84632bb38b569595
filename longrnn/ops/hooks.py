"""Whether calling a module does what its class says and nothing else."""

from __future__ import annotations

from itertools import repeat

from torch import nn
from torch.nn.modules import module as torch_module

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
