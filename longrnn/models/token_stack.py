"""One token of all blocks of a model in one call of C++.

Everything that a call reads of the modules is found once and used until it changes: another tensor,
module or number in its place, other memory or another dtype of a tensor, a hook. Looking for such
changes takes a tenth of the time of finding everything again. Values are read anew in each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from longrnn.models.blocks import Block
from longrnn.ops import native
from longrnn.ops.hooks import unhooked
from longrnn.ops.native.layer import Layer, Prepared, suits
from longrnn.ops.transforms import is_transformed
from longrnn.state import PyTree

# What decides whether the kernel can compute the blocks, and what its arguments depend on besides.
_KIND = attrgetter("dtype"), Tensor.is_contiguous
_PLACE = Tensor.data_ptr, Tensor.numel  # another device is another address


class TokenStack:
    """Remembers what was found of the blocks of one model. A copy of it remembers nothing."""

    def __init__(self) -> None:
        self._found: _Found | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenStack:
        return TokenStack()

    def __reduce__(self) -> tuple[type[TokenStack], tuple[()]]:
        return TokenStack, ()

    def run(
        self, blocks: nn.ModuleList, x: Tensor, states: Sequence[PyTree]
    ) -> tuple[Tensor, tuple[PyTree, ...]] | None:
        """Computes one token per row; None if that is not possible in one call.

        Args:
            blocks: `Block`s.
            x: `(b, 1, d)`.
            states: of the cell of each block; they are not changed.

        Returns:
            The output of the last block `(b, 1, d)`, and the states after the token.
        """
        if is_transformed() or x.device.type != "cpu" or not native.available():
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        # A local name, because other threads may replace the attribute.
        found = self._found
        if found is None or not found.is_of(blocks):
            self._found = found = _Found(blocks)
        if found.prepared is None:
            return None
        if torch.is_grad_enabled() and native.tracked(
            (x, *found.tensors, *chain.from_iterable(states))
        ):
            return None
        if not unhooked(*found.modules):
            return None
        after = found.prepared.step(x, states)
        if after is None:
            return None
        pairs = zip(states, after[1], strict=True)
        return after[0], tuple(type(state)(*pair) for state, pair in pairs)


class _Found:
    """What blocks consist of, and the arguments of the kernel.

    Attributes:
        prepared: None if the kernel cannot compute these blocks.
        tensors: that the kernel reads.
        modules: that it computes.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self._blocks, self._count = blocks, len(blocks)
        slots = list(_slots(blocks))
        self._holders, self._names, self._values = zip(*slots, strict=True)
        self.prepared: Prepared | None = None
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        held = {id(value): value for value in self._values if isinstance(value, Tensor)}
        layers = _layers(blocks) or []
        read = [one for layer in layers for one in layer.tensors()]
        # A tensor that is computed from a parameter would become stale.
        if layers and all(id(one) in held for one in read) and native.in_memory(read):
            self.prepared, self.tensors = Prepared(layers), read
            self.modules = list(_computed(blocks))
            self._watched, self._properties = read, (*_KIND, *_PLACE)
        else:
            self._watched, self._properties = (
                list(held.values()),
                (*_KIND, attrgetter("device")),
            )
        self._memory = self._read_memory()

    def is_of(self, blocks: nn.ModuleList) -> bool:
        """Whether these blocks consist of the same objects in the same memory."""
        if blocks is not self._blocks or len(blocks) != self._count:
            return False
        same = all(map(is_, map(dict.get, self._holders, self._names), self._values))
        return same and self._read_memory() == self._memory

    def _read_memory(self) -> list[list[Any]]:
        """Each property of all tensors at once: a loop over tensors costs more than the values."""
        return [list(map(read, self._watched)) for read in self._properties]


def _layers(blocks: nn.ModuleList) -> list[Layer] | None:
    layers = []
    for block in blocks:
        layer = block.native_layer() if isinstance(block, Block) else None
        if layer is None:
            return None
        layers.append(layer)
    return layers if suits(layers) else None


def _computed(blocks: nn.ModuleList) -> Iterator[nn.Module]:
    """The modules whose calls a call of the kernel replaces."""
    for block in blocks:
        assert isinstance(block, Block)
        yield block
        yield block.mixer
        yield from (block.mixer.get_submodule(name) for name in block.mixer.projections)


def _slots(blocks: nn.ModuleList) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where the blocks hold tensors, modules and attributes: a dictionary, a key and the value."""
    for module in blocks.modules():
        for holder in (module._parameters, module._buffers, module._modules):
            yield from ((holder, name, value) for name, value in holder.items())
    for block in blocks:
        for module in (block, block.mixer):
            own = vars(module)
            yield from ((own, name, own[name]) for name in own if not name.startswith("_"))
