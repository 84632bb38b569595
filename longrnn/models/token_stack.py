"""One token of all residual blocks of a Mamba or Mamba-2 in one call of C++.

A token of a layer takes less time than the calls of Python around it, whose code and data the
weights of each layer drive out of the caches. What the kernel reads of the modules is packed once,
and packed again when one of them has changed: another tensor, module or option in its place, or
other memory, strides, sizes or another dtype of a tensor. Values are read anew in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longrnn.cells import Edit, EditedState, Mamba, Mamba2, StepChange
from longrnn.cells.mamba import StepProjection
from longrnn.cells.scanning import STAGES
from longrnn.models.blocks import Block
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.cpu import tokens as cpu
from longrnn.ops.cpu.checks import MIXED, refusal, taps_refusal, tracked
from longrnn.ops.cpu.library import pack
from longrnn.ops.cpu.signatures import NUMBERS
from longrnn.ops.hooks import ModuleRecord, own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.scan.recent import Recent
from longrnn.state import PyTree

Edits = Sequence[Edit | None] | None
# Options of a cell that the kernel reads, or that exclude it.
CELL_OPTIONS = ("backend", "n_groups", "norm_eps", "dt_limit", "select_norm_eps")


class TokenStack:
    """Remembers what was packed of the blocks of one model. A copy of it remembers nothing."""

    def __init__(self) -> None:
        self._packed: _Packed | None = None

    def __reduce__(self) -> tuple[type[TokenStack], tuple[()]]:
        return TokenStack, ()

    def run(
        self, blocks: nn.ModuleList, x: Tensor, states: Sequence[PyTree], edits: Edits
    ) -> tuple[Tensor, tuple[PyTree, ...]] | None:
        """Computes a call of one token per row; None if the kernel cannot compute it.

        Args:
            blocks: of the model.
            x: `(b, t, d)`.
            states: of the cell of each block.
            edits: of each cell; None for no edits.

        Returns:
            The output of the last block `(b, 1, d)`, and the states after the tokens.
        """
        if x.shape[1] != 1 or len(x) > cpu.FEW_ROWS or torch.is_autocast_enabled("cpu"):
            return None
        # A local name, because other threads may replace the attribute.
        packed = self._packed
        if packed is None or not packed.is_of(blocks, edits):
            self._packed = packed = _Packed(blocks, edits)
        if packed.layers is None or x.dtype not in MIXED or packed.record.has_hooks:
            return None
        given, recents = list[ConvState](), list[Recent | None]()
        for state in states:
            is_edited = isinstance(state, EditedState)
            given.append(state.state if is_edited else state)
            recents.append(state.recent if is_edited else None)
        histories = chain(*(recent for recent in recents if recent is not None))
        leaves = [x, *chain(*given), *(history.entries for history in histories)]
        if refusal(leaves) is not None or tracked([*leaves, *packed.record.tensors]):
            return None
        like = given[0].ssm
        with torch.inference_mode(False):  # a later call may need gradients
            # Not one tensor: the allocator would return 32 MiB to the system after every token.
            memory = [torch.empty(like.shape, dtype=like.dtype, device="cpu") for _ in states]
        y, after, recents = cpu.layers(packed.layers, x, given, recents, memory)
        triples = zip(states, after, recents, strict=True)
        return y, tuple(_continued(*triple) for triple in triples)


def _continued(before: PyTree, after: ConvState, recent: Recent | None) -> PyTree:
    """The state of a cell after the tokens, in the form of the state before them."""
    if isinstance(before, EditedState):
        return before._replace(state=after, recent=recent)
    return after


class _Packed:
    """The blocks of a model as the kernel reads them.

    Attributes:
        record: of all modules that the kernel computes.
        layers: None if the kernel cannot compute these blocks.
    """

    def __init__(self, blocks: nn.ModuleList, edits: Edits) -> None:
        self._blocks, self._count, self._edits = blocks, len(blocks), edits
        options = [(block.mixer, name) for block in blocks for name in CELL_OPTIONS]
        options += [(block, "eps") for block in blocks]
        self.record = ModuleRecord(list(blocks.modules()), options)
        self.layers: cpu.PackedLayers | None = None
        if not all(map(_suits, blocks)):
            return
        packed = map(_layer, blocks, edits or [None] * len(blocks))
        layers = [layer for layer in packed if layer is not None]
        cells: list[Any] = [block.mixer for block in blocks]
        shapes = {tuple(leaf.shape for leaf in cell.state_like()) for cell in cells}
        kernels = {STACKED[type(cell)].name for cell in cells}
        if len(layers) == len(blocks) and len(shapes) == len(kernels) == 1:
            memory = cpu.joined([layer.content for layer in layers])
            self.layers = cpu.PackedLayers(kernels.pop(), memory, layers)

    def is_of(self, blocks: nn.ModuleList, edits: Edits) -> bool:
        """Whether these blocks consist of the same objects in the same memory."""
        return (
            blocks is self._blocks
            and edits is self._edits
            and len(blocks) == self._count
            and self.record.is_current()
        )


def _suits(block: nn.Module) -> bool:
    """Whether a kernel computes a block, gradients and hooks aside."""
    if type(block) is not Block or block.norm is None or type(block.mixer) not in STACKED:
        return False
    cell: Any = block.mixer
    if any(type(getattr(cell, projection)) is not Linear for projection in cell.projections):
        return False
    parameters = list(block.parameters())
    return (
        cell.backend in ("auto", "cpu")
        and STACKED[type(cell)].suits(cell)
        and all(weight.dtype in MIXED and weight.is_contiguous() for weight in parameters)
        and cell.state_like().ssm.dtype == torch.float32
        and all("forward" not in vars(module) for module in block.modules())
        and refusal(parameters) is None
        and taps_refusal(cell.d_conv) is None
    )


def _numbers(edit: Edit, heads: int) -> Tensor | None:
    """The changes of each head, a row of `(h,)` float64 for each of `NUMBERS`.

    None for an edit that the kernels do not compute.
    """
    if edit.stages - STAGES:
        return None
    change, *others = edit.changes or (StepChange(),)
    if others or not isinstance(change, StepChange):
        return None
    log_rate = change.log_rate
    if log_rate is not None and log_rate.shape[1] > 1:  # per key
        return None
    given = {
        "largest_ignored": change.largest_ignored(torch.float32),
        "step": change.step,
        "log_rate": None if log_rate is None else log_rate[:, 0],
        "power": change.power,
        "log_keep": None if edit.keep is None else edit.keep.log(),
        "add": edit.add,
        "limit": edit.limit,
        "bias": None if edit.bias is None else edit.bias[:, 0],
    }
    table = torch.tensor([*NUMBERS.values()], dtype=torch.float64)[:, None].repeat(1, heads)
    for row, name in zip(table, NUMBERS, strict=True):
        if (numbers := given.get(name)) is not None:
            row.copy_(numbers)
    return table


def _layer(block: nn.Module, edit: Edit | None) -> cpu.PackedLayer | None:
    """A block as its kernel reads it; None for an edit that it does not compute."""
    assert isinstance(block, Block)
    assert block.norm is not None
    cell: Any = block.mixer
    kernel = STACKED[type(cell)]
    numbers = None if edit is None else _numbers(edit, cell.n_heads)
    if edit is not None and numbers is None:
        return None
    every = torch.ones(cell.n_heads, dtype=torch.bool)
    mask = every if edit is None or edit.heads is None else edit.heads
    heads = mask.nonzero()[:, 0]
    arguments = {
        **kernel.arguments(cell),
        "d": cell.d_model,
        "eps": block.eps,
        "norm": own_weight(block.norm),
        "in_weight": cell.in_proj.weight,
        "in_bias": cell.in_proj.bias,
        "out_weight": cell.out_proj.weight,
        "out_bias": cell.out_proj.bias,
    }
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if not {*map(Tensor.data_ptr, tensors)} <= {*map(Tensor.data_ptr, block.parameters())}:
        return None  # a parametrization computes a weight anew in each call
    content = pack(kernel.struct, torch.float32, **arguments, edit=numbers)
    return cpu.PackedLayer(
        content,
        edit=numbers,
        window=None if edit is None else edit.window,
        heads=heads,
        # See `ScanInputs.heads`.
        groups=cell.n_groups if len(heads) == len(every) or cell.n_groups == 1 else len(heads),
    )


def _mamba2_arguments(cell: Mamba2) -> dict[str, Any]:
    return {
        "h": cell.n_heads,
        "p": cell.head_dim,
        "g": cell.n_groups,
        "n": cell.d_state,
        "k": cell.d_conv,
        "norm_eps": cell.norm_eps,
        "dt_least": cell.dt_limit[0],
        "dt_largest": cell.dt_limit[1],
        "conv_weight": own_weight(cell.conv1d),
        "conv_bias": cell.conv1d.bias,
        "dt_bias": cell.dt_bias,
        "A_log": cell.A_log,
        "D": cell.D,
        "norm_weight": own_weight(cell.norm),
    }


def _mamba_suits(cell: Mamba) -> bool:
    return type(cell.dt_proj) is StepProjection


def _mamba_arguments(cell: Mamba) -> dict[str, Any]:
    return {
        "h": cell.n_heads,
        "n": cell.d_state,
        "k": cell.d_conv,
        "rank": cell.dt_rank,
        "select_eps": -1.0 if cell.select_norm_eps is None else cell.select_norm_eps,
        "conv_weight": own_weight(cell.conv1d),
        "conv_bias": cell.conv1d.bias,
        "x_weight": cell.x_proj.weight,
        "dt_weight": cell.dt_proj.weight,
        "dt_bias": cell.dt_proj.bias,
        "A_log": cell.A_log,
        "D": cell.D,
    }


class _Stacked(NamedTuple):
    """How a kernel reads the blocks of one kind of cell.

    Attributes:
        name: of the kernel.
        struct: of `signatures`, with what it reads of one block.
        suits: whether it computes a cell with its options.
        arguments: what it reads of a cell but for the projections of input and output.
    """

    name: str
    struct: str
    suits: Callable[[Any], bool]
    arguments: Callable[[Any], dict[str, Any]]


STACKED: dict[type, _Stacked] = {
    Mamba: _Stacked("mamba_layers", "MambaLayer", _mamba_suits, _mamba_arguments),
    Mamba2: _Stacked("mamba2_layers", "Mamba2Layer", lambda cell: True, _mamba2_arguments),
}
