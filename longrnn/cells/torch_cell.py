"""Cells whose weights are those of a `torch.nn` module: kernels of torch, and in C++ on a CPU."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.edit import Edit
from longrnn.cells.stepwise import StepwiseCell
from longrnn.cells.weights import with_weights
from longrnn.ops.cpu import tokens as cpu
from longrnn.ops.linear import linear
from longrnn.ops.precision import own_precision, refuse_tf32
from longrnn.ops.transforms import in_forward_mode, in_vmap
from longrnn.state import PyTree

# Of an edit, those that the C++ cell computes.
KERNEL_STAGES = {"bias", "keep", "add", "limit"}


class HiddenState(NamedTuple):
    """`h`: `(b, d)`, the hidden vector, which is also the output."""

    h: Tensor


class TorchCell(StepwiseCell):
    """A stepwise cell with the weights of a `torch.nn` module, of a single layer, batch first.

    Its state is a `HiddenState`, unless a subclass says otherwise.

    Attributes:
        cell: the module, whose fused kernel runs when there is no edit.
        has_kernel: whether that kernel computes this cell.
        cpu_cell: its name among the C++ cells (`longrnn.ops.cpu.tokens.STEPWISE_CELLS`).
        cpu_first: whether the C++ cell is faster than the kernel of `cell`, where both run: on a
            CPU without gradients.
    """

    cell: nn.RNNBase
    has_kernel = True
    cpu_cell: str
    cpu_first = True
    recurrent_weights = ("cell.weight_hh_l0",)

    def fused(self, cell: nn.RNNBase, x: Tensor, state: PyTree) -> tuple[Tensor, PyTree]:
        """Computes the whole sequence with the kernel of `torch.nn`.

        Called only if `has_kernel`.

        Args:
            cell: the module.
            x: `(b, t, d_input)`.
            state: of the rows.
        """
        y, h = cell(x, state.h[None].contiguous())
        return y, HiddenState(h[0].to(state.h.dtype))

    def state_of(self, h: Tensor, memory: Tensor) -> PyTree:
        """The state with this output and this memory, `(b, d)` each."""
        return HiddenState(h)

    def state_like(self) -> PyTree:
        return HiddenState(self.vector_like())

    def project(self, x: Tensor) -> Tensor:
        """`W_ih x + b_ih`, `(b, t, gates · d)`."""
        weight_ih, _, bias_ih, _ = self.cell.all_weights[0]
        return F.linear(x, weight_ih, bias_ih)

    def recurrent(self, h: Tensor) -> Tensor:
        """`W_hh h + b_hh`, `(b, gates · d)`."""
        _, weight_hh, _, bias_hh = self.cell.all_weights[0]
        return F.linear(h, weight_hh, bias_hh)

    def vector_like(self) -> Tensor:
        """A hidden vector of one row, on the meta device."""
        weight = self.cell.all_weights[0][0]
        return torch.empty(self.d_model, dtype=weight.dtype, device="meta")

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of all submodules except `cell`, which stays in training mode.

        cuDNN refuses the backward pass of an RNN in eval mode, so gradients through a model loaded
        for evaluation need this. Without dropout both modes compute the same values.
        """
        super().train(mode)
        self.cell.train()
        return self

    def run(self, x: Tensor, state: PyTree, edit: Edit | None) -> tuple[Tensor, PyTree]:
        if self.is_observed or (edit is not None and edit.stages - KERNEL_STAGES):
            return super().run(x, state, edit)
        refuse_tf32(x)
        weight_ih, weight_hh, bias_ih, bias_hh = self.cell.all_weights[0]
        has_fused = self.has_kernel and not (in_forward_mode() or in_vmap())
        fused = has_fused and (edit is None or edit.stages == {"bias"})
        with own_precision(x):
            x = x.to(weight_ih.dtype)
            if self.cpu_first or not fused:
                h, memory, numbers = state.h, self.vector(state), _numbers(edit)
                bias_ih = self.biased(bias_ih, edit)
                if cpu.stepwise_suits(x, weight_ih, weight_hh, bias_ih, bias_hh, h, memory):
                    projected = linear(x, weight_ih, bias_ih)
                    y, h, memory = cpu.stepwise(
                        self.cpu_cell, projected, weight_hh, bias_hh, h, memory, **numbers
                    )
                    return y, self.state_of(h, memory)
            if fused:
                return self.fused(self._biased_cell(edit), x, state)
            return super().run(x, state, edit)

    def _biased_cell(self, edit: Edit | None) -> nn.RNNBase:
        """`cell`, or one that shares its weights but for those that an edit adds to."""
        if edit is None:
            return self.cell
        bias: Any = self.cell.bias_hh_l0
        return with_weights(self.cell, {"bias_hh_l0": self.biased(bias, edit)})

    def extra_repr(self) -> str:
        with_gradients = "torch.nn" if self.has_kernel else "one token after another"
        weight = next(self.cell.parameters())
        if cpu.refusal((weight,)) is not None or (self.has_kernel and not self.cpu_first):
            return f"kernel={with_gradients}"
        return f"kernel=C++ without gradients, {with_gradients} with gradients"


def _numbers(edit: Edit | None) -> dict[str, float]:
    """An edit of `KERNEL_STAGES` as the arguments of the C++ cell."""
    if edit is None:
        return {}
    return {name: float(getattr(edit, name)) for name in edit.stages - {"bias"}}
