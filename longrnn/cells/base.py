"""The interface of a cell: (x, state) → (y, state), one code path for any number of tokens."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.cells.edit import Edit, StepChange
from longrnn.cells.weights import Part, with_addition, with_weights
from longrnn.errors import UserError
from longrnn.ops.rows import Rows, run_documents
from longrnn.registry import Registry
from longrnn.state import PyTree, tree_map

# Of an edit, the stages that weights can express.
FOLDING = {"steps", "rate", "bias", "weights"}


class EditedState(NamedTuple):
    """The state of a cell whose edit has a window.

    Attributes:
        state: the cell's own state.
        recent: what the edit remembers: the inputs of the last tokens.
        window: `(b, 0, window, heads)`, see `Edit.window_sizes`. It holds no numbers: by its shape,
            a state of another window is refused.
    """

    state: PyTree
    recent: PyTree
    window: Tensor


class KnownLike(NamedTuple):
    """What `Cell.like` returned: the plain state, the edit, and the state with its window."""

    plain: PyTree
    edit: Edit
    edited: EditedState


class Cell(nn.Module, ABC):
    """A recurrent cell over a whole sequence.

    The constructor of every cell takes `d_input`, the width of its input, and `d_model`, the width
    of its output; options are keyword-only. The recurrence itself is a submodule, `recurrence`,
    which computes the edits; a forward hook of it observes every call.

    Attributes:
        n_heads: number of heads, the parts of a state that mitigations treat separately.
        recurrent_weights: names of the parameters that determine the recurrence;
            `longrnn diagnose gradients` and DataParallel need them.
        wide_weights: names of the parameters that are never cast to a narrower dtype.
        projections: names of the linear layers that may be replaced by others of the same sizes.
            Only the first projection reads the input.
        scans: whether its state is computed by a scan.
        has_steps: whether a step dt and a rate A determine its decays.
        constant_step: whether that step is the same for every token.
        gated: whether its new memory is linear in the old one, given the gates.
        diagonal: whether a token multiplies the memory by numbers, not by a matrix.
        rate_weight: name of the weight that determines the rates A; None where tokens do.
        bias_weight: name of the weight that has the bias of the steps, or of the forget gate.
        dt_weight: of `step_weights`, the one whose product with a vector of a token and that bias
            has dt as its softplus, head after head; None in other cells.
    """

    n_heads = 1
    recurrent_weights: tuple[str, ...] = ()
    wide_weights: tuple[str, ...] = ()
    projections: tuple[str, ...] = ()
    scans = False
    has_steps = False
    constant_step = False
    gated = True
    diagonal = True
    rate_weight: str | None = None
    bias_weight: str | None = None
    dt_weight: str | None = None
    recurrence: nn.Module
    # The last result of `like`, because it is needed per token.
    _known_like: KnownLike | None = None

    def __init__(self, d_input: int, d_model: int) -> None:
        super().__init__()
        self.d_input, self.d_model = d_input, d_model

    @property
    def kind(self) -> str:
        """See `kind_of`."""
        return kind_of(type(self))

    @property
    def step_weights(self) -> Mapping[str, Part]:
        """The parts of weights that make steps and gates of the memory from tokens, by name.

        Without biases that `bias_weight` names; empty where every token has the same step.
        """
        return {}

    @property
    def is_observed(self) -> bool:
        """Whether a hook observes the recurrence, which kernels for whole layers would pass by."""
        return bool(self.recurrence._forward_hooks or self.recurrence._forward_pre_hooks)

    @property
    def device(self) -> torch.device:
        """That of the weights."""
        # By name if possible: a replica of DataParallel has no parameters, only attributes.
        names = self.recurrent_weights or [name for name, _ in self.named_parameters()]
        return attrgetter(names[0])(self).device

    @abstractmethod
    def state_like(self) -> PyTree:
        """The state of one row without its batch axis, as tensors on the meta device."""

    @abstractmethod
    def run(self, x: Tensor, state: PyTree, edit: Edit | None) -> tuple[Tensor, PyTree]:
        """`forward` for rows of a single document without padding."""

    @abstractmethod
    def memory(self, state: PyTree, edit: Edit | None = None) -> Tensor:
        """The part of a state that recurs, by head: `(b, h, p, n)`; n is 1 in a stepwise cell.

        Args:
            state: of this cell; an `EditedState` under a window.
            edit: with which it was computed.
        """

    @abstractmethod
    def initial_recent(self, batch_size: int, edit: Edit) -> PyTree:
        """`EditedState.recent` before the first token, for an edit with a window."""

    def run_packed(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows
    ) -> tuple[Tensor, PyTree]:
        """`forward` for packed rows; this implementation suits every cell."""
        run = partial(self.run, edit=edit)
        return run_documents(run, x, state, self.init_state(len(x), edit), rows)

    def forward(
        self, x: Tensor, state: PyTree, edit: Edit | None = None, rows: Rows | None = None
    ) -> tuple[Tensor, PyTree]:
        """Runs the cell.

        Args:
            x: `(b, t, d_input)`, t >= 1.
            state: from `init_state` or an earlier call with the same edit; it is not changed.
            edit: changes the recurrence.
            rows: where documents and padding begin; None for rows of one document without padding.
                Before the first token of a document the state is the initial one; padding does not
                change it, and its outputs are 0.

        Returns:
            y `(b, t, d_model)`, and the state after the last token.
        """
        if edit is not None:
            edit = edit.to(x.device)
            if edit.weights is not None:
                cell = with_weights(self, self._with_additions(edit.weights))
                return cell.forward(x, state, edit._replace(weights=None), rows)
        if rows is None:
            return self.run(x, state, edit)
        return self.run_packed(x, state, edit, rows)

    def init_state(self, batch_size: int, edit: Edit | None = None) -> PyTree:
        """The state of `batch_size` rows before the first token, on the parameters' device."""
        device = self.device

        def zeros(leaf: Tensor) -> Tensor:
            return torch.zeros(batch_size, *leaf.shape, dtype=leaf.dtype, device=device)

        state = tree_map(zeros, self.state_like())
        if edit is None or edit.window is None:
            return state
        window = torch.zeros(batch_size, 0, *edit.window_sizes, device=device)
        return EditedState(state, self.initial_recent(batch_size, edit), window)

    def like(self, edit: Edit | None) -> PyTree:
        """A state of one row without batch axis, for comparisons of structure, sizes and dtypes."""
        plain = self.state_like()
        if edit is None or edit.window is None:
            return plain
        known = self._known_like
        if known is None or known.plain is not plain or known.edit is not edit:
            recent = tree_map(lambda leaf: leaf[0], self.initial_recent(1, edit))
            window = torch.zeros(0, *edit.window_sizes, device="meta")
            known = KnownLike(plain, edit, EditedState(plain, recent, window))
            self._known_like = known
        return known.edited

    def fold(self, edit: Edit) -> dict[str, Tensor] | None:
        """The weights with which this cell computes without an edit what it computes under it.

        Args:
            edit: on the device of the weights.

        Returns:
            Weights by name, in float64 rounded to the dtype of the weight that each replaces; None
            where no weights do the same.

        Raises:
            UserError: additions for more keys or units than the cell has.
        """
        change, *others = edit.steps or (StepChange(),)
        if edit.stages - FOLDING or others or not isinstance(change, StepChange):
            return None
        if change.threshold is not None or change.step is not None:
            return None
        weights = self._with_additions(edit.weights or {})
        if any(numbers is not None for numbers in (edit.rate, change.power, change.log_rate)):
            if self.rate_weight is None:
                return None
            weight = attrgetter(self.rate_weight)(self)
            log_rate = self._added(self.log_rate(weight.double()), edit.rate)
            by_head = log_rate.reshape(self.n_heads, -1)
            if change.power is not None:
                by_head = by_head * change.power[:, None]
            if change.log_rate is not None:
                by_head = by_head + change.log_rate
            largest = math.log(torch.finfo(weight.dtype).max) - 1  # A is finite, as in an edit
            folded = self.weight_of_log_rate(by_head.clamp(max=largest).view(weight.shape))
            weights[self.rate_weight] = folded.to(weight.dtype)
        if edit.bias is not None:
            if self.bias_weight is None:
                return None
            weight = attrgetter(self.bias_weight)(self)
            before, biases, after = weight.double().flatten().split(self.bias_sizes(weight))
            folded = torch.cat([before, self._added(biases, edit.bias), after])
            weights[self.bias_weight] = folded.view(weight.shape).to(weight.dtype)
        return weights

    def _with_additions(self, additions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights with additions to their parts in `step_weights`."""
        return {
            name: with_addition(attrgetter(name)(self), self.step_weights[name], addition)
            for name, addition in additions.items()
        }

    def _added(self, weight: Tensor, addition: Tensor | None) -> Tensor:
        """A weight plus an addition by head, `(h, 1)` or `(h, k)`."""
        if addition is None:
            return weight
        by_head = weight.reshape(self.n_heads, -1)
        if addition.shape[1] not in (1, by_head.shape[1]):
            raise UserError(
                f"a head of this cell has {by_head.shape[1]} keys or units, and the lists have "
                f"{addition.shape[1]} numbers for one: give one number per head, or as many"
            )
        return (by_head + addition).view(weight.shape)

    def log_rate(self, weight: Tensor) -> Tensor:
        """The logarithm of |A| from `rate_weight`."""
        return weight

    def weight_of_log_rate(self, log_rate: Tensor) -> Tensor:
        """The inverse of `log_rate`."""
        return log_rate

    def bias_sizes(self, weight: Tensor) -> list[int]:
        """How many numbers of `bias_weight` are before, in and after the bias."""
        return [0, weight.numel(), 0]

    def init_time_scales(self, scales: Tensor) -> bool:
        """Initialises the gate that decides how long a new cell remembers, if it has such a gate.

        Args:
            scales: `(d,)` for a stepwise cell, `(h,)` for a scanning cell: number of tokens after
                which about 1/e of the memory of a unit or head is left, at least 2.

        Returns:
            Whether the cell has such a gate.
        """
        return False


MIXERS: Registry[Cell] = Registry("mixer")


def kind_of(cell: type[Cell]) -> str:
    """Its name in `MIXERS`; that of its class for a layer of Hugging Face models alone."""
    names = (name for name, member in MIXERS.items() if issubclass(cell, member))
    return next(names, cell.__name__)
