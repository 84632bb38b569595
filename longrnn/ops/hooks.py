"""Whether calling a module does what its class says and nothing else."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module


def unhooked(*modules: nn.Module) -> bool:
    """Whether no module has hooks or a `forward` of its own, and there are no global hooks.

    Code that computes several modules at once must not run otherwise: hooks observe and change what
    each module computes.
    """
    return not torch_module._has_any_global_hook() and not any(
        one._forward_hooks
        or one._forward_pre_hooks
        or one._backward_hooks
        or one._backward_pre_hooks
        or "forward" in vars(one)
        for one in modules
    )
