"""Cells that compute one token after another, in operations of torch."""

from abc import abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import Cell, EditedState
from longrnn.cells.edit import Edit, Update
from longrnn.ops.precision import own_precision, refuse_tf32
from longrnn.ops.scan.limit import rescale
from longrnn.state import History, PyTree

# Of an edit; a cell without heads needs no mask of them.
STEPWISE_STAGES = {"bias", "keep", "add", "limit", "window", "heads"}


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
    """A cell that computes one token after another.

    Its state is a NamedTuple with a field `h`, `(b, d)`, the output.
    """

    def __init__(self, d_input: int, d_model: int) -> None:
        super().__init__(d_input, d_model)
        self.recurrence = Advance()

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """Computes what depends on the input alone: `(b, t, d_input)` → `(b, t, k)`."""

    @abstractmethod
    def step(self, projected: Tensor, state: PyTree) -> tuple[Update, Callable[[Tensor], PyTree]]:
        """Computes one token from its projection, `(b, k)`.

        Returns:
            The update of the memory, and a function from the new memory to the new state.
        """

    def vector(self, state: PyTree) -> Tensor:
        """The memory, the vector of a state that recurs, `(b, d)`; by default `h`."""
        return state.h

    def memory(self, state: PyTree, edit: Edit | None = None) -> Tensor:
        return self.vector(_cell_state(state))[:, None, :, None]

    def initial_recent(self, batch_size: int, edit: Edit) -> RecentUpdates:
        none = self.vector(self.init_state(batch_size)).new_zeros(batch_size, 0, self.d_model)
        return RecentUpdates(History(none), History(none))

    def run(self, x: Tensor, state: PyTree, edit: Edit | None) -> tuple[Tensor, PyTree]:
        refuse_tf32(x)
        # Autocast is off: a memory with 8 significant bits loses small additions.
        with own_precision(x):
            projected = self.project(x.to(_cell_state(state).h.dtype))
            return self._unrolled(self.biased(projected, edit), state, edit)

    def biased(self, projected: Tensor, edit: Edit | None) -> Tensor:
        """Projections, or their bias, with the additions of an edit to that of the forget gate."""
        if edit is None or edit.bias is None or self.bias_weight is None:
            return projected
        first, size, last = self.bias_sizes(attrgetter(self.bias_weight)(self))
        return projected + F.pad(edit.biased(projected.new_zeros(size)), (first, last))

    def _unrolled(
        self, projected: Tensor, state: PyTree, edit: Edit | None
    ) -> tuple[Tensor, PyTree]:
        """Computes one token after another in operations of torch.

        Under a window of w tokens, the memory after token r of a block of w is the sum over the
        tokens of the block, and the sum over those of the w before the block that are after r,
        decayed from the block's start. The latter sums are computed once per block.
        """
        edit = Edit() if edit is None else edit
        edit.refuse_unknown(STEPWISE_STAGES, f"the cell {self.kind}")
        if edit.window is None:
            return self._tokens(projected, state, edit, None)
        cell_state, recent = state.state, state.recent
        outputs = []
        for part in projected.split(edit.window, dim=1):
            older = _older(recent, edit.window, part.shape[1])
            updates: list[Update] = []
            y, cell_state = self._tokens(part, cell_state, edit, older, updates)
            outputs.append(y)
            recent = _appended(recent, updates, edit.window)
        return torch.cat(outputs, dim=1), state._replace(state=cell_state, recent=recent)

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
            projected: `(b, t, k)`.
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


def _cell_state(state: PyTree) -> PyTree:
    """The cell's own state."""
    return state.state if isinstance(state, EditedState) else state


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
    keep, add = (history.entries.flip(1)[:, : window - 1] for history in recent)  # the newest first
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
        last(recent.keep, [update.keep for update in updates]),  # type: ignore[misc]
        last(recent.add, [update.add for update in updates]),
    )
