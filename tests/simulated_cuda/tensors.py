"""Tensors on the simulated device, and the checks of every operation on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated_cuda.device import CPU, CUDA, DEVICE
from tests.simulated_cuda.trees import leaves_of, mapped

aten = torch.ops.aten
# Operations that read both devices: copies, and indices on the CPU.
MIXED = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}
# Operations whose result, or its size, the CPU has to know.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "unique_consecutive", "equal", "is_nonzero", "repeat_interleave", "allclose",
}  # fmt: skip


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype) @ b.to(dtype)


def _histogram(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.histc(values.float(), *args, **kwargs).to(values.dtype)


# What torch's CPU backend lacks.
ONLY_ON_GPUS: dict[Any, Any] = {aten.mm.dtype: _wide_product, aten.histc.default: _histogram}


class SimulatedTensor(Tensor):
    """A tensor on the simulated device.

    Attributes:
        on_cpu: its values, on the CPU, at the address of the tensor.
    """

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> SimulatedTensor:
        found = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,
        )
        found.on_cpu = inner
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self) -> Any:
        return self.on_cpu.untyped_storage()

    def storage(self) -> Any:
        return self.on_cpu.storage()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.cpu().numpy()

    def tolist(self) -> Any:
        DEVICE.wait("tolist")
        return self.on_cpu.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.on_cpu.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.on_cpu!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def is_on_gpu(value: Any) -> bool:
    return isinstance(value, SimulatedTensor)


def _alias(value: Any) -> Any:
    """The same numbers with a shape of their own, which may be changed in place."""
    return value.detach() if isinstance(value, Tensor) else value


def _frozen(value: Any) -> Any:
    """An argument of a captured operation: numbers of the CPU stay what they were."""
    if is_on_gpu(value):
        return value.on_cpu.detach()
    return value.clone() if isinstance(value, Tensor) else value


def inner(value: Any) -> Any:
    return value.on_cpu if isinstance(value, SimulatedTensor) else value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation, on the device of its tensors."""
    tensors = [one for one in leaves_of((args, kwargs)) if isinstance(one, Tensor)]
    ours = [one for one in tensors if is_on_gpu(one)]
    name = func.overloadpacket.__name__
    target = kwargs.get("device")
    wanted = torch.device(target).type if target is not None else None
    _check(name, tensors, ours, args)
    reads_back = name == "copy_" and bool(ours) and not is_on_gpu(args[0])
    masked = name.startswith("index") and any(
        one is not None and one.dtype in (torch.bool, torch.uint8) for one in _indices(args)
    )
    if ours and (reads_back or masked or name in WAITING):
        DEVICE.wait(name)
    # To torch, our tensors are on the CPU: it asks for results beside them.
    on_gpu = wanted == "cuda" or (bool(ours) and not reads_back)
    on_gpu = (on_gpu or (not tensors and DEVICE.inside_ours)) and wanted != "meta"
    if wanted in ("cpu", "cuda"):
        kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    if name == "_to_copy" and on_gpu and not ours and DEVICE.graph is not None:
        raise RuntimeError("a graph captures no copy from pageable memory")
    changes_shape = torch.Tag.inplace_view in func.tags
    plain_args, plain_kwargs = mapped(inner, (args, kwargs))
    run: Any = ONLY_ON_GPUS.get(func, func)
    found = run(*plain_args, **plain_kwargs)
    if on_gpu and DEVICE.graph is not None and not changes_shape:
        known_args, known_kwargs = mapped(_frozen, (args, kwargs))
        DEVICE.graph.record(run, known_args, known_kwargs, mapped(_alias, found))
    if changes_shape and ours:
        with no_dispatch():  # the same change of the shape
            func(*args, **kwargs)
    known = {id(inner(one)): one for one in ours}

    def outer(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_on_gpu(value):
            return value
        if id(value) in known:
            return known[id(value)]
        return SimulatedTensor(value) if on_gpu else value

    return mapped(outer, found)


def _indices(args: Any) -> list[Tensor | None]:
    return list(args[1]) if len(args) > 1 and isinstance(args[1], (list, tuple)) else []


def _check(name: str, tensors: list[Tensor], ours: list[Tensor], args: Any) -> None:
    """Raises where a GPU would: for tensors of both devices that are not scalars."""
    if not ours:
        return
    others = [one for one in tensors if not is_on_gpu(one) and one.ndim > 0]
    if others and name not in MIXED:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {name}"
        )
    if others and name.startswith(("index", "_index")) and not is_on_gpu(args[0]):
        raise RuntimeError(f"indices should be on the CPU: {name}")


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What torch decides before it calls an operation, by the device in a tensor's own header."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.device:
            args, kwargs = mapped(_numbered, (args, kwargs))
        if func in _MOVES:
            device, dtype, copy = _MOVES[func](*args[1:], **kwargs)
            if device in (None, CPU, CUDA):
                return _moved(args[0], device, dtype, copy)
        if str(kwargs.get("device")) == "cpu" and any(map(is_on_gpu, leaves_of((args, kwargs)))):
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            return _ToCPU.apply(func(*args, **kwargs))
        if func is Tensor.new_tensor and is_on_gpu(args[0]):
            return func(*args, **{"device": CUDA, **kwargs})
        _check_generator(args, kwargs)
        outside = DEVICE.inside_ours
        DEVICE.inside_ours = any(map(is_on_gpu, leaves_of((args, kwargs))))
        try:
            return func(*args, **kwargs)
        finally:
            DEVICE.inside_ours = outside


def _check_generator(args: Any, kwargs: Any) -> None:
    """Numbers are drawn on the device of their generator."""
    drawn = kwargs.get("generator")
    if drawn is None:
        return
    ours = str(kwargs.get("device")).startswith("cuda") or any(map(is_on_gpu, leaves_of(args)))
    if (drawn.device.type == "cuda") != ours:
        raise RuntimeError(f"Expected a generator of the other device, found {drawn.device}")


def _numbered(value: Any) -> Any:
    """`cuda` with its number, which torch otherwise asks the driver for."""
    is_device = isinstance(value, (str, torch.device))
    return CUDA if is_device and str(value) == "cuda" else value


def _target(*args: Any, copy: bool = False, **kwargs: Any) -> tuple[torch.device | None, Any, bool]:
    """The device, dtype and whether to copy, of the arguments of `Tensor.to`."""
    given = [*args, *kwargs.values()]
    like = next((one for one in given if isinstance(one, Tensor)), None)
    if like is not None:
        return like.device, like.dtype, copy
    device = next(
        (torch.device(one) for one in given if isinstance(one, (str, torch.device))), None
    )
    return device, next((one for one in given if isinstance(one, torch.dtype)), None), copy


_MOVES = {
    Tensor.to: _target,
    Tensor.cpu: lambda **_: (CPU, None, False),
    Tensor.cuda: lambda *_, **__: (CUDA, None, False),
}


def _moved(tensor: Tensor, device: torch.device | None, dtype: Any, copy: bool) -> Tensor:
    if device is None or device == tensor.device:
        return Tensor.to(tensor, dtype or tensor.dtype, copy=copy)
    if device == CUDA and not is_on_gpu(tensor):
        return aten._to_copy(tensor, dtype=dtype, device=CUDA)
    return _ToCPU.apply(tensor if dtype is None else Tensor.to(tensor, dtype))


class _ToCPU(torch.autograd.Function):
    """To torch itself the values are on the CPU already."""

    @staticmethod
    def forward(ctx: Any, tensor: SimulatedTensor) -> Tensor:
        DEVICE.wait("copy to the CPU")
        return tensor.on_cpu.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return SimulatedTensor(grad)
