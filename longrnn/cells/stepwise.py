"""Cells that compute one token after another: RNN, GRU, LSTM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from longrnn.cells.base import Cell, EditedState
from longrnn.cells.edit import Edit, Update
from longrnn.ops import cpu
from longrnn.ops.limit import rescale
from longrnn.ops.linear import linear
from longrnn.ops.precision import own_precision, refuse_tf32
from longrnn.ops.rows import Rows, run_packed_sequence
from longrnn.ops.transforms import in_forward_mode
from longrnn.state import History, PyTree

SequenceT = TypeVar("SequenceT", Tensor, PackedSequence)


class RecentUpdates(NamedTuple):
    """The updates of the last tokens, fewer than the window; `keep` and `add` are `(b, l, d)`."""

    keep: History
    add: History


class Advance(nn.Module):
    """The new memory after one token. It has no weights."""

    def forward(self, update: Update, memory: Tensor, limit: Tensor | None) -> Tensor:
        """Applies an update.

        Args:
            update: after stage 2.
            memory: `(b, d)`, before the token; the sum over the window but for this token, decayed
                to the token before, if there is a window.
            limit: `(1,)`, the largest norm; None for no limit.
        """
        keep, add = update.keep, update.add
        after = add if keep is None else torch.addcmul(add, keep, memory)
        return after if limit is None else rescale(after, limit)


class StepwiseCell(Cell):
    """A cell that computes one token after another: RNN, GRU, LSTM.

    A cell holds a `torch.nn` module (one layer, batch first), whose fused kernel runs when there is
    no edit, and implements `step`, the same equations for one token.

    Attributes:
        has_kernel: whether the kernel of `cell` computes this cell.
        cpu_cell: its name among the C++ cells (`longrnn.ops.cpu.kernels.CELLS`).
        cpu_first: whether the C++ cell is faster than the kernel of `cell`, where both run: on a
            CPU without gradients.
        packs_on_cpu: whether this kernel is the fastest for documents of several lengths on a CPU.
    """

    cell: nn.RNNBase
    has_kernel = True
    cpu_cell: str
    cpu_first = True
    packs_on_cpu = True
    recurrent_weights = ("cell.weight_hh_l0",)

    def __init__(self, d_input: int, d_model: int) -> None:
        super().__init__(d_input, d_model)
        self.recurrence = Advance()

    @abstractmethod
    def fused(self, x: SequenceT, state: PyTree) -> tuple[SequenceT, PyTree]:
        """Computes the whole sequence with the kernel of `torch.nn`.

        Called only if `has_kernel`.

        Args:
            x: `(b, t, d_input)`, or a `PackedSequence` of rows of several lengths, longest first.
            state: of the rows.
        """

    @abstractmethod
    def vector(self, state: PyTree) -> Tensor:
        """The memory, the vector of a state that recurs, `(b, d)`."""

    @abstractmethod
    def state_of(self, h: Tensor, memory: Tensor) -> PyTree:
        """The state with this output and this memory, `(b, d)` each."""

    @abstractmethod
    def step(self, projected: Tensor, state: PyTree) -> tuple[Update, Callable[[Tensor], PyTree]]:
        """Computes one token from its input projection `W_ih x + b_ih`, `(b, gates · d)`.

        Returns:
            The update of the memory, and a function from the new memory to the new state.
        """

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of all submodules except `cell`, which stays in training mode.

        cuDNN refuses the backward pass of an RNN in eval mode, so gradients through a model loaded
        for evaluation need this. Without dropout both modes compute the same values.
        """
        super().train(mode)
        self.cell.train()
        return self

    def memory(self, state: PyTree, edit: Edit | None = None) -> Tensor:
        own = state.state if isinstance(state, EditedState) else state
        return self.vector(own)[:, None, :, None]

    def no_tokens(self, batch_size: int, edit: Edit) -> RecentUpdates:
        none = self.vector(self.init_state(batch_size)).new_zeros(batch_size, 0, self.d_model)
        return RecentUpdates(History(none), History(none))

    def run(self, x: Tensor, state: PyTree, edit: Edit | None) -> tuple[Tensor, PyTree]:
        refuse_tf32(x)
        weight_ih, weight_hh, bias_ih, bias_hh = self.cell.all_weights[0]
        # Autocast is off: a memory with 8 significant bits loses small additions.
        with own_precision(x):
            x = x.to(weight_ih.dtype)
            observed = self.is_observed
            fused = edit is None and not observed and self.has_kernel and not in_forward_mode()
            if (fused and not self.cpu_first) or observed or (edit and edit.window is not None):
                in_cpp = False
            else:
                leaves = (state.h, self.vector(state))
                in_cpp = cpu.stepwise_suits(x, weight_ih, weight_hh, bias_ih, bias_hh, *leaves)
            if in_cpp:
                projected = linear(x, weight_ih, bias_ih)
                y, h, memory = cpu.stepwise(
                    *(self.cpu_cell, projected, weight_hh, bias_hh, *leaves), **_numbers(edit)
                )
                return y, self.state_of(h, memory)
            if fused:
                return self.fused(x, state)
            return self._unrolled(F.linear(x, weight_ih, bias_ih), state, edit)

    def run_packed(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows
    ) -> tuple[Tensor, PyTree]:
        packs = self.has_kernel and (self.packs_on_cpu or x.device.type != "cpu")
        if edit is not None or not packs or in_forward_mode():
            return super().run_packed(x, state, edit, rows)
        refuse_tf32(x)
        with own_precision(x):
            x = x.to(self.cell.all_weights[0][0].dtype)
            return run_packed_sequence(self.fused, x, state, self.init_state(1), rows)

    def _unrolled(
        self, projected: Tensor, state: PyTree, edit: Edit | None
    ) -> tuple[Tensor, PyTree]:
        """Computes one token after another in operations of torch.

        Under a window of w tokens, the memory after token r of a block of w is the sum over the
        tokens of the block, and the sum over those of the w before the block that are after r,
        decayed from the block's start. The latter sums are computed once per block.
        """
        edit = Edit() if edit is None else edit
        if edit.window is None:
            return self._tokens(projected, state, edit, None)
        own, recent = state
        outputs = []
        for part in projected.split(edit.window, dim=1):
            older = _older(recent, edit.window, part.shape[1])
            updates: list[Update] = []
            y, own = self._tokens(part, own, edit, older, updates)
            outputs.append(y)
            recent = _appended(recent, updates, edit.window)
        return torch.cat(outputs, dim=1), EditedState(own, recent)

    def _tokens(
        self,
        projected: Tensor,
        state: PyTree,
        edit: Edit,
        older: Tensor | None,
        updates: list[Update] | None = None,
    ) -> tuple[Tensor, PyTree]:
        """The tokens of a call, or of one block of a window.

        Args:
            projected: `(b, t, gates · d)`.
            state: the cell's own.
            edit: of the layer.
            older: `(b, t, d)`, what each token's window has of the tokens before the
                block; None without a window.
            updates: receives the update of every token.
        """
        outputs, inside, since = [], None, None
        for t, token in enumerate(projected.unbind(1)):
            update, read = self.step(token, state)
            update = _edited(update, edit)
            before = self.vector(state)
            if older is not None:
                assert update.keep is not None
                assert updates is not None
                updates.append(update)
                inside = update.add if inside is None else update.add + update.keep * inside
                since = update.keep if since is None else since * update.keep
                update = Update(inside + since * older[:, t], None)
            state = read(self.recurrence(update, before, edit.limit))
            outputs.append(state.h)
        return torch.stack(outputs, dim=1), state

    def extra_repr(self) -> str:
        with_gradients = "torch.nn" if self.has_kernel else "one token after another"
        weight = next(self.cell.parameters())
        if cpu.refusal((weight,)) is not None or (self.has_kernel and not self.cpu_first):
            return f"kernel={with_gradients}"
        return f"kernel=C++ without gradients, {with_gradients} with gradients"

    def recurrent(self, h: Tensor) -> Tensor:
        """`W_hh h + b_hh`, `(b, gates · d)`."""
        _, weight_hh, _, bias_hh = self.cell.all_weights[0]
        return F.linear(h, weight_hh, bias_hh)

    def vector_like(self) -> Tensor:
        """A hidden vector of one row, on the meta device."""
        weight = self.cell.all_weights[0][0]
        return torch.empty(self.d_model, dtype=weight.dtype, device="meta")


def _numbers(edit: Edit | None) -> dict[str, float]:
    """An edit without a window as the arguments of the C++ cell."""
    if edit is None:
        return {}
    given = {"keep": edit.keep, "add": edit.add, "limit": edit.limit}
    return {name: float(one) for name, one in given.items() if one is not None}


def _edited(update: Update, edit: Edit) -> Update:
    """Stage 2: the factors of `keep` and `add`."""
    add, keep = update
    if edit.add is not None:
        add = add * edit.add.to(add)
    if edit.keep is not None and keep is not None:
        keep = keep * edit.keep.to(keep)
    return Update(add, keep)


def _older(recent: RecentUpdates, window: int, tokens: int) -> Tensor:
    """What the window of each token of the next block has of the tokens before it, `(b, t, d)`.

    Token r of the block, from 0, has the last w − 1 − r tokens before the block.
    """
    keep, add = (one.entries.flip(1)[:, : window - 1] for one in recent)  # the newest first
    decay = F.pad(keep, (0, 0, 1, 0), value=1.0).cumprod(1)[:, :-1]
    sums = F.pad((decay * add).cumsum(1), (0, 0, 1, 0))
    count = window - 1 - torch.arange(tokens, device=add.device)
    return sums.index_select(1, count.clamp(max=add.shape[1]))


def _appended(recent: RecentUpdates, updates: list[Update], window: int) -> RecentUpdates:
    """The updates of the last window − 1 tokens."""
    most = window - 1

    def last(before: History, new: list[Tensor]) -> History:
        both = torch.cat([before.entries, torch.stack(new, dim=1)], dim=1)
        return History(both[:, both.shape[1] - min(most, both.shape[1]) :])

    return RecentUpdates(
        last(recent.keep, [one.keep for one in updates]),  # type: ignore[misc]
        last(recent.add, [one.add for one in updates]),
    )
