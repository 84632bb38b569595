"""The recurrence of cells that scan, with the edits of a layer applied stage by stage."""

import math
from abc import abstractmethod
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells.base import Cell, EditedState
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.recurrence import Memory, Recurrence, head_index
from longrnn.errors import UserError, nearest
from longrnn.ops.conv import CONV
from longrnn.ops.conv.definition import ConvState
from longrnn.ops.hooks import own_weight
from longrnn.ops.operation import Operation
from longrnn.ops.rows import Rows
from longrnn.ops.scan import SCAN
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.recent import Recent
from longrnn.ops.scan.window import initial_recent, state_of
from longrnn.state import PyTree, reset

# The stages of an edit that `ScanningCell.run` computes.
STAGES = frozenset({"rate", "bias", "steps", "keep", "add", "limit", "window", "heads"})
NO_EDIT = Edit()


class ScanningCell(Cell):
    """A cell whose memory is a matrix by head, to which each token adds x_t B_tᵀ, read by C_t.

    A subclass gives `before` and `after`, and may replace `inputs`. Its output is the last of its
    `projections`, and the memory is the field `ssm` of its state.

    Args:
        d_input: width of x.
        d_model: width of y.
        backend: `auto`, or the name of implementations of its operations.

    Attributes:
        operation: the recurrence, `SCAN` or `DELTA`.
        repeats: whether reading the same inputs once more maps the memory in the same way, so that
            `longrnn.ops.repeat` gives the state after many readings.
        unsuited_backends: names of implementations that compute no call of this cell.
        has_key_decays: whether each key of a head has a decay of its own.
        n_groups: how many B and C a window remembers per token; 0 for one per head.
        shown: names of the attributes in its `repr`.
    """

    scans = True
    has_steps = True
    repeats = True
    operation: ClassVar[Operation] = SCAN
    unsuited_backends = frozenset({"mamba_ssm"})  # whose x is multiplied by the step of the decay
    has_key_decays = False
    n_groups: int = 0
    shown: tuple[str, ...] = ("n_heads",)
    backend: str
    conv1d: nn.Conv1d

    def __init__(self, d_input: int, d_model: int, backend: str = "auto") -> None:
        super().__init__(d_input, d_model)
        names = self.backends()
        if backend not in ("auto", *names):
            raise UserError(f"this cell has no backend {backend!r}: {nearest(backend, names)}")
        self.backend = backend
        self.recurrence = Recurrence()

    @classmethod
    def backends(cls) -> list[str]:
        """The names of the implementations of the recurrence."""
        names = [each.name for each in cls.operation.implementations]
        return [name for name in names if name not in cls.unsuited_backends]

    @abstractmethod
    def before(self, x: Tensor, state: PyTree, edit: Edit, rows: Rows | None) -> tuple[Steps, Any]:
        """Computes everything before the recurrence: projections, convolution, gates.

        Args:
            x: `(b, t, d_input)`.
            state: of the cell, before the first token.
            edit: `Edit.biased` adds to the bias of steps; other stages are applied to the result.
            rows: where documents and padding begin; None for rows of one document.

        Returns:
            The steps, and what `inputs` and `after` need, a NamedTuple of the cell's own.
        """

    def convolved(self, x: Tensor, state: Any, rows: Rows | None) -> tuple[Tensor, Tensor]:
        """The short convolution of `(b, t, c)` with silu, 0 at padding, and its last inputs."""
        weight, bias = own_weight(self.conv1d)[:, 0], self.conv1d.bias
        y, last = CONV(self.backend, x, weight, bias, state.conv, rows)
        return y if rows is None else rows.without_padding(y), last

    def inputs(self, steps: Steps, rest: Any) -> tuple[Any, Any]:
        """Computes the inputs of the recurrence from the edited steps.

        Args:
            steps: dt and the step of the decay are 0 at padding.
            rest: of `before`.

        Returns:
            `ScanInputs`, or what the cell's own `recurrence` takes, with a field `decay`; and
            `rest`, with what `after` needs of the edited steps. `steps.decay` has the factor `keep`
            of an edit and `steps.gain` the factor `add`. Documents are separated later. This
            implementation reads B and C from `rest`.
        """
        return ScanInputs(steps.x, steps.gain, steps.decay, rest.B, rest.C), rest

    @abstractmethod
    def after(self, y: Tensor, rest: Any, memory: Tensor) -> tuple[Tensor, PyTree]:
        """Computes everything after the recurrence.

        Args:
            y: `(b, t, h, p)`, its output.
            rest: of `inputs`.
            memory: `(b, h, p, n)`, its state after the last token.

        Returns:
            The output `(b, t, d_model)` and the state of the cell.
        """

    def run(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows | None = None
    ) -> tuple[Tensor, PyTree]:
        """`forward`, except for a state before a document that is not finite."""
        edited, recent = None, None
        if isinstance(state, EditedState):
            edited, state, recent = state, state.state, state.recent
        edit = NO_EDIT if edit is None else edit
        if edit is not NO_EDIT:
            edit.refuse_unknown(STAGES, type(self).__name__)
        steps, rest = self.before(x, state, edit, rows)
        if rows is not None:
            steps = steps.each(rows.without_padding)
        if edit is not NO_EDIT:
            steps = edit.apply(steps)
        inputs, rest = self.inputs(steps, rest)
        if rows is not None:
            inputs = inputs._replace(decay=_separated(inputs.decay, rows))
        before = Memory(state.ssm, recent)
        y, memory = self.recurrence(inputs, before, edit, self.operation, self.backend, rows)
        if rows is not None and edit.limit is not None:
            # A limit may change a state where nothing is added to it.
            memory = memory._replace(state=reset(memory.state, before.state, rows.count == 0))
        y, state = self.after(y, rest, memory.state)
        return y, state if edited is None else edited._replace(state=state, recent=memory.recent)

    def run_packed(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows
    ) -> tuple[Tensor, PyTree]:
        # A log decay of −∞ restarts the recurrence, where nothing before it is NaN or infinite.
        initial = self.init_state(len(x), edit)
        before = reset(state, initial, rows.is_start[:, 0])
        y, after = self.run(x, before, edit, rows)
        if rows.has_starts and not bool(y.detach().sum().isfinite()):
            return super().run_packed(x, state, edit, rows)
        return rows.without_padding(y), after

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        """See `Cell`; by the rates, where a bias has the initial step as its softplus."""
        if self.rate_weight is None or self.bias_weight is None:
            return False
        rate, bias = (attrgetter(name)(self) for name in (self.rate_weight, self.bias_weight))
        # dt · |A| = 1 / scale, for all keys
        rate.view(self.n_heads, -1).copy_(-(scales * F.softplus(bias)).log()[:, None])
        return True

    def inputs_like(self) -> ScanInputs:
        """The inputs of the scan for one row without tokens, on the device of the weights."""
        ssm = self.state_like().ssm
        heads, channels, keys = ssm.shape
        gain = torch.empty(1, 0, heads, dtype=ssm.dtype, device=self.device)
        decay = Decay(gain.new_empty(1, 0, heads, keys) if self.has_key_decays else gain)
        B = gain.new_empty(1, 0, self.n_groups or heads, keys)
        return ScanInputs(gain.new_empty(1, 0, heads, channels), gain, decay, B, B)

    def initial_recent(self, batch_size: int, edit: Edit) -> Recent:
        return initial_recent(self._windowed(edit), batch_size)

    def memory(self, state: PyTree, edit: Edit | None = None) -> Tensor:
        if edit is None or edit.window is None:
            return state.ssm
        of_windows = state_of(state.recent, self._windowed(edit))
        if edit.heads is None:
            return of_windows
        inside = head_index(edit.heads, of_windows)
        return state.state.ssm.index_copy(1, inside, of_windows)

    def _windowed(self, edit: Edit) -> ScanInputs:
        """`inputs_like` of the windowed heads, with the decay under an edit."""
        like = self.inputs_like()
        decay = edit.apply(Steps(like.x, like.gain, like.decay)).decay
        like = like._replace(decay=decay)
        return like if edit.heads is None else like.heads(head_index(edit.heads, like.x))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in (*self.shown, "backend"))


def _separated(decay: Decay, rows: Rows) -> Decay:
    """A decay that is 1 at padding, where its step is 0, and 0 where a document begins."""
    keep = decay.keep
    if keep is not None and rows.has_padding:
        keep = keep.where(~rows.is_padding[..., None], 1.0)
    step = rows.without_padding(decay.step)
    starts = rows.is_start.view(*rows.is_start.shape, *[1] * (step.ndim - 2))
    step = step.masked_fill(starts, -torch.inf if decay.rate is None else torch.inf)
    return decay._replace(step=step, keep=keep)


def check_sizes(norm_eps: float, *, eps_name: str = "norm_eps", **sizes: int) -> None:
    """Raises a `UserError` for a size below 1, or an epsilon that is not valid in a norm."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} must be at least 1, not {size}: set a positive number")
    if not (norm_eps >= 0 and math.isfinite(norm_eps)):
        raise UserError(f"{eps_name} must be at least 0 and finite, not {norm_eps}: give 1e-5")


def divided(whole: int, meaning: str, **divisor: int) -> int:
    """`whole` by a size, or a `UserError` if that size does not divide it."""
    ((name, size),) = divisor.items()
    if whole % size:
        raise UserError(f"{name} {size} does not divide {meaning} {whole}: set another {name}")
    return whole // size


@lru_cache(maxsize=64)
def conv_state_like(conv: tuple[int, ...], ssm: tuple[int, ...], dtype: torch.dtype) -> ConvState:
    """A state of these sizes without values, `ssm` in float32 or wider.

    All cells of these shapes share it: it is needed per token.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return ConvState(
        torch.empty(conv, dtype=dtype, device="meta"), torch.empty(ssm, dtype=wide, device="meta")
    )


def step_bias(count: int, least: float = 1e-3, largest: float = 0.1) -> nn.Parameter:
    """Biases whose softplus, the initial step, is log-uniform between two numbers."""
    step = torch.empty(count).uniform_(math.log(least), math.log(largest)).exp()
    return nn.Parameter(inverse_softplus(step))


def inverse_softplus(step: Tensor) -> Tensor:
    """The number of which a positive number is the softplus."""
    return step + torch.log(-torch.expm1(-step))
