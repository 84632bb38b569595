"""Kernels in C++ with their gradients, which cannot themselves be differentiated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.ops.cpu.checks import refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call


class Differentiable(NamedTuple):
    """A computation by a kernel, of which the kernel `<name>_gradient` computes the gradient.

    The backward pass keeps the given tensors, and computes everything else again.

    Attributes:
        name: of the kernel in `longrnn.ops.cpu.signatures`.
        fields: (tensors by name) → the arguments that both kernels share.
        run: (tensors by name) → y, and the state after the last token, if there is one.
    """

    name: str
    fields: Callable[..., dict[str, Any]]
    run: Callable[..., Any]

    def __call__(self, **tensors: Tensor | None) -> Any:
        """The results of `run`, differentiable in all tensors."""
        if tracked(tensors.values()):
            return _Function.apply(self, tuple(tensors), *tensors.values())
        return self.run(**tensors)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Differentiable, names: tuple[str, ...], *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.kernel, ctx.names = kernel, names
        return kernel.run(**dict(zip(names, tensors, strict=True)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("C++")
        tensors = ctx.saved_tensors
        fields = ctx.kernel.fields(**dict(zip(ctx.names, tensors, strict=True)))
        dtype = fields["x"].dtype
        found = [
            None if tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)
            for tensor in tensors
        ]
        of_results = zip(("grad_y", "grad_final"), grads, strict=False)
        call(
            f"{ctx.kernel.name}_gradient",
            dtype,
            **fields,
            **{name: grad.to(dtype).contiguous() for name, grad in of_results},
            **{f"grad_{name}": grad for name, grad in zip(ctx.names, found, strict=True)},
        )
        narrow = [
            None if grad is None else grad.to(tensor.dtype)
            for grad, tensor in zip(found, tensors, strict=True)
        ]
        return None, None, *narrow
