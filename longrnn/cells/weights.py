"""Changed weights of a cell: parts of weights with additions, and a copy of the cell that has them.

A change of weights is data of an edit, as everything else that a mitigation changes. A cell under
it is computed by a shallow copy that shares all other tensors, so that gradients reach the
additions and the weights alike; `Cell.fold` writes the same values into the weights.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# What a weight is indexed with.
Part = tuple[slice | list[int], ...]
WHOLE: Part = (slice(None),)


def rows_from(first: int, stop: int | None = None) -> Part:
    """The rows of a weight from an index on, up to another one."""
    return (slice(first, stop),)


def with_addition(weight: Tensor, part: Part, addition: Tensor) -> Tensor:
    """A weight whose part has an addition, in float64 rounded to the dtype of the weight."""
    changed = weight.clone()
    changed[part] = (weight[part].double() + addition).to(weight.dtype)
    return changed


def with_weights(module: ModuleT, weights: Mapping[str, Tensor]) -> ModuleT:
    """A shallow copy of a module with other tensors in the place of some of its weights.

    Args:
        module: is not changed, and shares everything else with the copy.
        weights: by the name with which the module reads them. Below an adapter, and where a
            parametrization computes a weight, the tensor has another owner, which is replaced.
    """
    owners = {id(weight): name for name, weight in module.named_parameters()}
    found = {name: attrgetter(name)(module) for name in weights}
    return _copied(module, {owners.get(id(found[name]), name): weights[name] for name in weights})


def _copied(module: ModuleT, weights: Mapping[str, Tensor]) -> ModuleT:
    """`with_weights`, by the names of the owners."""
    copied: Any = object.__new__(type_before_parametrizations(module))
    parameters, modules = dict(module._parameters), dict(module._modules)
    vars(copied).update(vars(module), _parameters=parameters, _modules=modules)
    computed: Any = modules.pop("parametrizations", ())
    for name in computed:
        parameters[name] = getattr(module, name)
    inner: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = weight
        else:  # a replica of DataParallel has attributes in the place of parameters
            (vars(copied) if first in vars(copied) else parameters)[first] = weight  # type: ignore[assignment]
    for name, of_child in inner.items():
        child = modules[name]
        assert child is not None
        modules[name] = _copied(child, of_child)
    if isinstance(module, nn.RNNBase):
        flat = [getattr(copied, name) for name in module._flat_weights_names]
        # Without references, torch does not look for weights that have changed.
        vars(copied).update(_flat_weights=flat, _flat_weight_refs=[None] * len(flat))
    return copied
