"""Model and loss as one module, so that a wrapper for many devices sees one forward call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.data import Batch
from longrnn.models import TrainableLM
from longrnn.ops.loss import token_cross_entropy, weighted_cross_entropy
from longrnn.ops.rows import Rows
from longrnn.state import LMState, reset
from longrnn.training.repeat import read_repeatedly


class StepOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        loss: scalar; see `Objective`.
        state: from which a carried row continues.
        predictions: `(b, t)` ids for every segment, −100 where there is no target.
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


class Objective(nn.Module):
    """The loss of a batch: the mean over rows of the weighted sum over tokens.

    Because it is a mean over rows, two processes with half of the rows each have the same mean
    gradient as one process with all rows.

    Args:
        model: the language model to train, under the mitigation of the run.
    """

    def __init__(self, model: TrainableLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, segments: Sequence[Batch], state: LMState) -> StepOutput:
        """The mean loss of consecutive segments, with one gradient through all of them.

        Args:
            segments: of the same rows.
            state: from which the first segment starts, also in rows that begin a document. In the
                other segments, rows that begin a document start from zero.
        """
        losses: list[Tensor] = []
        predictions: list[Tensor] = []
        for batch in segments:
            if losses:
                state = reset(state, self.model.init_state(len(batch.begins)), batch.begins)
            loss, state, predicted = self._segment(batch, state)
            losses.append(loss)
            predictions.append(predicted)
        return StepOutput(torch.stack(losses).mean(), state, predictions)

    def token_losses(
        self, tokens: Tensor, targets: Tensor, state: LMState, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor, LMState]:
        """The loss of each token, without gradients.

        Args:
            tokens: `(b, t)`.
            targets: `(b, t)`; the loss is 0 where they are negative.
            state: before the first token.
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

    def _segment(self, batch: Batch, state: LMState) -> tuple[Tensor, LMState, Tensor]:
        """The loss from an initial state; see `Batch` for its weights and its query."""
        body = slice(0, batch.tokens.shape[1] - batch.query_length)
        tokens, rows = batch.tokens[:, body], rows_of(batch, body)
        hidden, state = read_repeatedly(self.model, tokens, state, batch.repeat, rows)
        if batch.query_length:
            query, _ = self.model.hidden(batch.tokens[:, body.stop :], state)
            hidden = torch.cat([hidden, query], dim=1)
        weights = batch.weights
        if weights is None:
            scored = batch.answers().to(torch.promote_types(hidden.dtype, torch.float32))
            weights = scored / scored.sum(1, keepdim=True).clamp(min=1)
        targets = batch.targets
        # Logits are computed only at targets: a reversal task has them in its second half only.
        scored = (targets.flatten() >= 0).nonzero()[:, 0]
        loss, predicted = weighted_cross_entropy(
            *self.model.logit_factors(hidden.flatten(0, 1).index_select(0, scored)),
            targets.flatten()[scored],
            (weights / len(weights)).flatten()[scored],
            soft_cap=self.model.soft_cap,
        )
        predictions = targets.flatten().index_copy(0, scored, predicted).view_as(targets)
        return loss, state, predictions
