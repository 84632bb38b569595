"""What code must know that computes modules without calling them."""

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from longrnn.errors import UserError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def own(module: nn.Module) -> nn.Module:
    """A module that is computed without a plain call of it.

    Raises:
        UserError: an adapter of PEFT took its place, which only a call computes.
    """
    if "base_layer" in module._modules:
        raise UserError(
            "an adapter of the head, of a convolution, of a norm or of a parameter such as A_log "
            "would have no effect, because longrnn reads these weights without calling their "
            "modules: give the adapter other target_modules, for example in_proj and out_proj"
        )
    return module


def own_weight(module: nn.Module) -> Tensor:
    """The weight of such a module; see `own`."""
    return own(module).weight  # type: ignore[return-value]


class ModuleRecord:
    """What modules held when it was made, to tell in little time whether it is still so.

    It reads the dictionaries of torch's modules. What torch offers instead, `named_parameters`,
    takes longer than the computation of a token, and nothing tells whether a module has hooks.

    Args:
        modules: whose parameters, submodules and hooks are recorded.
        options: further values, as objects and names of attributes of their own.

    Attributes:
        tensors: the recorded parameters.
    """

    def __init__(
        self, modules: Sequence[nn.Module], options: Iterable[tuple[object, str]] = ()
    ) -> None:
        slots = [
            (holder, name)
            for module in modules
            for holder in (module._parameters, module._modules)
            for name in holder
        ]
        slots += [(vars(owner), name) for owner, name in options if name in vars(owner)]
        self._holders = [holder for holder, _ in slots]
        self._names = [name for _, name in slots]
        self._values = self._held()
        self.tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._layouts = self._memory()
        self._hooks = [getattr(module, name) for module in modules for name in HOOKS]

    @property
    def has_hooks(self) -> bool:
        """Whether a hook of a module, or of all modules, observes or changes a call."""
        return any(self._hooks) or bool(torch_module._has_any_global_hook())

    def is_current(self) -> bool:
        """Whether the modules hold the same objects, and the tensors the same numbers in memory."""
        return all(map(is_, self._held(), self._values)) and self._memory() == self._layouts

    def _held(self) -> list[Any]:
        return list(map(dict.get, self._holders, self._names))

    def _memory(self) -> list[list[Any]]:
        # One loop over all tensors per property: a loop over tensors in Python takes longer.
        properties = (Tensor.data_ptr, Tensor.stride, Tensor.size, attrgetter("dtype"))
        return [list(map(read, self.tensors)) for read in properties]
