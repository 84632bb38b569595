"""Whether torch records or transforms the operations of a call instead of just computing them."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _get_dispatch_mode, _get_tracing_state, _TorchDispatchModeKey
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    TransformType,
    get_interpreter_stack,
    maybe_current_level,
)
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


def is_transformed() -> bool:
    """Whether a kernel that torch does not know would leave a call's result out of a record.

    That is so under torch.func, whose tensors have no memory to read, in forward-mode automatic
    differentiation, which would lose the tangent, and while torch.compile, torch.jit.trace or
    make_fx writes a program, in which the result would be a constant.
    """
    return (
        torch.compiler.is_compiling()
        or maybe_current_level() is not None
        or in_forward_mode()
        or _get_tracing_state() is not None
        or _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None
    )


def in_forward_mode() -> bool:
    """Whether torch computes derivatives forward: in a `dual_level`, or under `torch.func.jvp`.

    Our autograd functions and the kernels of `torch.nn` have backward passes only. Operations that
    torch differentiates take their place.
    """
    return forward_ad._current_level >= 0


def in_vmap() -> bool:
    """Whether a call is inside `torch.func.vmap`, which allows no choice by values.

    It has no rules for the kernels of `torch.nn` either.
    """
    stack = () if torch.compiler.is_compiling() else get_interpreter_stack() or ()
    return any(one.key() == TransformType.Vmap for one in stack)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """The results of a function.

    Its backward pass computes the intermediate values again, unless the call is transformed.
    """
    if torch.is_grad_enabled() and not is_transformed():
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)
