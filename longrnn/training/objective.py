"""Model and loss as one module, so that a wrapper for many devices sees one forward call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longrnn.data import Batch
from longrnn.models import TrainableLM
from longrnn.ops.loss import token_cross_entropy, weighted_cross_entropy
from longrnn.ops.rows import Rows
from longrnn.state import LMState, clone, leaves, reset, tree_map, unflatten
from longrnn.training.repeat import read_repeatedly

# Up to this many segments, the state before each is kept for the backward pass. Of more, those
# before groups of them, whose number is the square root: one more forward pass, and less memory.
MAX_KEPT_STATES = 128
# Modules and classes; those with a teacher import transformers.
OBJECTIVES = {
    "tokens": "longrnn.training.objective:Objective",
    "attention": "longrnn.training.distillation:AttentionDifference",
    "teacher": "longrnn.training.distillation:Teacher",
}


class StepOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        loss: see `Objective`; scalar.
        state: from which a carried row continues.
        predictions: `(b, t)` ids for every segment, −100 where there is no target; empty if the
            objective predicts none.
    """

    loss: Tensor
    state: LMState
    predictions: list[Tensor]


def rows_of(batch: Batch, columns: slice) -> Rows | None:
    """Where documents and padding begin in some columns of a batch; None without any."""
    masks = [
        None if mask is None else mask[:, columns]
        for mask in (batch.is_token, batch.inner_starts())
    ]
    return None if masks == [None, None] else Rows(*masks)


def token_weights(batch: Batch, dtype: torch.dtype) -> Tensor:
    """The weight of each token in the mean over rows, `(b, t)` in float32 or wider."""
    weights = batch.weights
    if weights is None:
        scored = batch.answers().to(torch.promote_types(dtype, torch.float32))
        weights = scored / scored.sum(1, keepdim=True).clamp(min=1)
    return weights / len(weights)


def objective_class(name: str) -> type[Objective]:
    """The class of an objective by its name in a configuration."""
    module, _, target = OBJECTIVES[name].partition(":")
    return getattr(import_module(module), target)


def _recomputed(
    read: Callable[[Sequence[Batch], LMState], StepOutput],
    segments: Sequence[Batch],
    state: LMState,
) -> StepOutput:
    """`read(segments, state)`, which the backward pass computes again from the state."""
    structure = tree_map(lambda leaf: None, state)

    def run(*values: Tensor) -> StepOutput:
        return read(segments, unflatten(structure, values))

    # Only tensors that are arguments themselves are dropped where one recomputation is in another.
    values = [leaf for _, leaf in leaves(state)]
    output: Any = checkpoint(run, *values, use_reentrant=False)
    # Where the state was allocated, it would divide the memory that is now free.
    return output._replace(state=clone(output.state))


class Objective(nn.Module):
    """The loss of a batch: the mean over rows of the weighted sum over tokens.

    Because it is a mean over rows, two processes with half of the rows each have the same mean
    gradient as one process with all rows.

    Args:
        model: the language model to train, under the mitigation of the run.
        recomputes: whether the backward pass computes each segment again from the state before it,
            so that memory is that of one segment. Gradients have the same bits.
    """

    def __init__(self, model: TrainableLM, *, recomputes: bool = False) -> None:
        super().__init__()
        self.model, self.recomputes = model, recomputes

    def forward(self, segments: Sequence[Batch], state: LMState | None) -> StepOutput:
        """The mean loss of consecutive segments, with one gradient through all of them.

        Args:
            segments: of the same rows.
            state: from which the first segment starts, also in rows that begin a document; None for
                the initial state of the model, from which all other documents start.
        """
        if state is None:
            state = self.model.init_state(len(segments[0].tokens))
        first, *others = segments
        output = self._read([first.continued(), *others], state)
        return output._replace(loss=output.loss.mean())

    def _read(self, segments: Sequence[Batch], state: LMState) -> StepOutput:
        """`forward` with the loss of each segment, in which rows that begin are started."""
        count = len(segments)
        size = math.isqrt(count) if self.recomputes and count > MAX_KEPT_STATES else 1
        losses: list[Tensor] = []
        predictions: list[Tensor] = []
        for start in range(0, count, size):
            group = segments[start : start + size]
            read = self._segment if size == 1 else self._read
            if self.recomputes and torch.is_grad_enabled():
                loss, state, predicted = _recomputed(read, group, state)
            else:
                loss, state, predicted = read(group, state)
            losses.append(loss)
            predictions += predicted
        return StepOutput(torch.cat(losses), state, predictions)

    def token_losses(
        self, tokens: Tensor, targets: Tensor, state: LMState | None, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor, LMState]:
        """The loss of each token, without gradients.

        Args:
            tokens: `(b, t)`.
            targets: `(b, t)`; the loss is 0 where they are negative.
            state: before the first token; None for the initial state of the model.
            rows: where documents and padding begin.

        Returns:
            Losses in nats, `(b, t)` float32 or wider; the most likely ids, `(b, t)`; and the state
            after the last token.
        """
        hidden, state = self.model.hidden(tokens, state, rows=rows)
        losses, predictions = token_cross_entropy(
            *self.model.logit_factors(hidden), targets, soft_cap=self.model.soft_cap
        )
        return losses, predictions, state

    def _segment(self, segments: Sequence[Batch], state: LMState) -> StepOutput:
        """`_read` of one segment; see `Batch` for its weights and its query."""
        (batch,) = segments
        state = reset(state, self.model.init_state(len(batch.begins)), batch.begins)
        body = slice(0, batch.tokens.shape[1] - batch.query_length)
        tokens, rows = batch.tokens[:, body], rows_of(batch, body)
        hidden, state = read_repeatedly(self.model, tokens, state, batch.repeat, rows)
        if batch.query_length:
            query, _ = self.model.hidden(batch.tokens[:, body.stop :], state)
            hidden = torch.cat([hidden, query], dim=1)
        weights, targets = token_weights(batch, hidden.dtype), batch.targets
        # Logits are computed only at targets: a reversal task has them in its second half only.
        scored = (targets.flatten() >= 0).nonzero()[:, 0]
        loss, predicted = weighted_cross_entropy(
            *self.model.logit_factors(hidden.flatten(0, 1).index_select(0, scored)),
            targets.flatten()[scored],
            weights.flatten()[scored],
            soft_cap=self.model.soft_cap,
        )
        predictions = targets.flatten().index_copy(0, scored, predicted).view_as(targets)
        return StepOutput(loss[None], state, [predictions])
