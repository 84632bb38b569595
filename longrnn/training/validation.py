"""Validation during training: the loss on held-out rows, also beyond the training length.

Notable choices:
- Rows are drawn once, from a seed that is not that of the run: runs with different seeds are
  compared on the same rows. Every row starts from the initial state of the model.
- A position is that of a token in its document: rows may hold several documents.
- Every process reads every row, so that one process and two compute the same.
- Rows are read in pieces, and only some logits (`longrnn.ops.loss`) exist at a time: memory does
  not grow with the length of a row.
"""

import torch
from torch import Tensor

from longrnn.data import UNSCORED, Batch, Task, Text
from longrnn.errors import UserError
from longrnn.training.config import TrainConfig
from longrnn.training.objective import Objective, rows_of

# Tokens of a row that are read at a time.
TOKENS_AT_ONCE = 4096
# By default, validation rows are this many times as long as the longest training row.
VALIDATED_MULTIPLE = 16


class Validation:
    """Measures the loss on held-out rows.

    Args:
        config: has a `validation`.
        positions: those of the model, to which rows are limited; None without a limit.
        training: whose data must not be validated on.
        task: of `config.validation`.

    Attributes:
        edges: positions between which losses are averaged: 0, the training length, twice that, …

    Raises:
        UserError: rows cannot be made, or are training data.
    """

    def __init__(
        self, config: TrainConfig, positions: int | None, training: Task, task: Task
    ) -> None:
        self.config, self.task = config, task
        _refuse_overlap(training, task)
        trained = config.length.max
        length = config.eval_length or VALIDATED_MULTIPLE * trained
        self.rows = task.held_out(config.eval_samples, length=min(length, positions or length))
        whole = self.rows.tokens.shape[1]
        doubled = (trained * 2**k for k in range(whole.bit_length()))
        self.edges = [0, *(edge for edge in doubled if edge < whole), whole]
        # Between which edges each token lies, `(rows, t)`.
        ends = torch.tensor(self.edges[1:])
        self._parts = torch.bucketize(_positions(self.rows).contiguous(), ends, right=True)

    @torch.no_grad()
    def evaluate(self, objective: Objective) -> dict[str, float]:
        """Evaluates the model.

        Args:
            objective: without a wrapper for several devices.

        Returns:
            Metrics: `eval_loss` in nats per scored token; `eval_loss_to_N`, that between the
            previous edge and position N; and `eval_…`, the scores of the task.
        """
        device = next(objective.parameters()).device
        size, n = self.config.per_device_train_batch_size, len(self.rows.tokens)
        objective.eval()  # without dropout
        batches = (self.rows.row(*range(i, min(i + size, n))) for i in range(0, n, size))
        read = [self._read(objective, rows.to(device)) for rows in batches]
        objective.train()
        losses, predictions = map(torch.cat, zip(*read, strict=True))
        scored = self.rows.targets != UNSCORED
        values = {"eval_loss": float(losses[scored].mean())}
        for part, stop in enumerate(self.edges[1:]):
            if (is_inside := scored & (self._parts == part)).any():
                values[f"eval_loss_to_{stop}"] = float(losses[is_inside].mean())
        scores = self.task.score(predictions, self.rows)
        return values | {f"eval_{name}": float(x.mean()) for name, x in scores.items() if len(x)}

    def _read(self, objective: Objective, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses in nats, float64, and predicted ids of rows, `(b, t)` each on the CPU."""
        state = None
        nats, predictions = [], []
        for start in range(0, batch.tokens.shape[1], TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            losses, ids, state = objective.token_losses(
                batch.tokens[:, part], batch.targets[:, part], state, rows_of(batch, part)
            )
            nats.append(losses.double().cpu())
            predictions.append(ids.cpu())
        return torch.cat(nats, 1), torch.cat(predictions, 1)


def _positions(rows: Batch) -> Tensor:
    """The position of each token in its document, as far as its row holds it; `(b, t)` int64."""
    time = torch.arange(rows.tokens.shape[1]).expand(rows.tokens.shape)
    starts = rows.inner_starts()
    return time if starts is None else time - time.where(starts, 0).cummax(1).values


def _refuse_overlap(training: Task, validation: Task) -> None:
    """Refuses text that the run trains on."""
    if not isinstance(training, Text) or not isinstance(validation, Text):
        return
    parts = {training.corpus.part, validation.corpus.part}
    both = {*training.corpus.header.sources} & {*validation.corpus.header.sources}
    if both and parts != {"training", "held_out"}:
        raise UserError(
            f"validation reads {min(both)}, which the run trains on: set validation=held_out, or "
            "give it data of its own"
        )
