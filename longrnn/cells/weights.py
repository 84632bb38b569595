"""Computes a module with other weights, and leaves the module as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def with_weights(module: ModuleT, weights: Mapping[str, Tensor]) -> ModuleT:
    """A shallow copy of a module that computes with some other weights.

    The module is not changed, so that threads may share it, and the copy has the hooks of all
    submodules. Gradients reach what the weights were computed from.

    Args:
        module: shares all other weights with the copy.
        weights: by name; a dotted one is that of a submodule.
    """
    if "base_layer" in module._modules:  # an adapter of PEFT, which computes with that layer
        weights = {f"base_layer.{name}": tensor for name, tensor in weights.items()}
    kind: Any = type(module)
    # A property, with which a parametrization computes a weight, would hide the other weight.
    if computed := {name for name in weights if isinstance(getattr(kind, name, None), property)}:
        kind = type(kind.__name__, (kind,), dict.fromkeys(computed))
    copied: ModuleT = kind.__new__(kind)
    # What is in the dictionary of an object takes precedence over parameters and submodules.
    attributes = vars(copied)
    attributes.update(vars(module))
    for name, tensor in weights.items():
        first, _, rest = name.partition(".")
        attributes[first] = with_weights(getattr(copied, first), {rest: tensor}) if rest else tensor
    if isinstance(copied, nn.RNNBase):  # which lists its weights
        attributes["_flat_weights"] = [getattr(copied, name) for name in copied._flat_weights_names]
    return copied
