"""Validation during training: the loss on held-out rows, also beyond the training length.

Notable choices:
- Rows are drawn once, from a seed that is not that of the run: runs with different seeds are
  compared on the same rows. Every row starts from the zero state.
- A position is that of a token in its document: rows may hold several documents.
- Losses are summed by position and over processes, so every process sees the same numbers and
  makes the same decisions; one process and two agree to rounding.
- Rows are read in pieces, and only some logits (`longrnn.ops.loss`) exist at a time: memory does
  not grow with the length of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn import processes
from longrnn.data import UNSCORED, Batch, Task, Text
from longrnn.errors import LengthError, UserError
from longrnn.models import RecurrentLM
from longrnn.training.config import TrainConfig
from longrnn.training.objective import Objective, rows_of

# Tokens of a row that are read at a time.
PIECE = 4096
# By default, validation rows are this many times as long as the longest training row.
BEYOND = 16


class Best(NamedTuple):
    """The best evaluation: the number of steps, and the loss over all positions."""

    step: int
    loss: float


class Validation:
    """Measures the loss on held-out rows and remembers the best evaluation.

    Args:
        config: has a `validation`.
        model: in training; its number of positions limits the default length.
        training: whose data must not be validated on.
        task: of `config.validation`.

    Attributes:
        edges: positions between which losses are averaged: 0, the training length, twice that, …
        best: the best evaluation; None before the first.

    Raises:
        UserError: rows cannot be made, or overlap with the training data.
    """

    def __init__(self, config: TrainConfig, model: RecurrentLM, training: Task, task: Task) -> None:
        self.config, self.task = config, task
        if task.vocab_size > model.vocab_size:
            raise UserError(
                f"the validation uses {task.vocab_size} token ids and the model has "
                f"{model.vocab_size}: give validation data of the same kind as the task"
            )
        _refuse_overlap(training, task)
        length, self.rows = self._draw(model.max_length)
        whole = max(self.rows.tokens.shape[1], length)
        trained = min(config.length.max, length)
        doubled = (trained * 2**k for k in range(whole.bit_length()))
        self.edges = [0, *(edge for edge in doubled if edge < whole), whole]
        self.best: Best | None = None
        # Between which edges each token lies, `(rows, t)`.
        ends = torch.tensor(self.edges[1:])
        self._parts = torch.bucketize(_positions(self.rows).contiguous(), ends, right=True)

    def _draw(self, positions: int | None) -> tuple[int, Batch]:
        """The length of rows, and the rows; by default as long as model and data have them."""
        length, trained = self.config.eval_length, self.config.length.max
        if length is None:
            length = min(BEYOND * trained, positions or math.inf)
        elif positions is not None and length > positions:
            raise UserError(
                f"the model has {positions} positions and validation rows have eval_length="
                f"{length} tokens: set eval_length={positions} or less"
            )
        while True:
            try:
                return int(length), self.task.held_out(self.config.eval_samples, length=int(length))
            except LengthError as error:
                if self.config.eval_length is not None or length // 2 < trained:
                    raise LengthError(
                        f"validation rows of {length} tokens cannot be made: {error}"
                    ) from error
                length //= 2

    @torch.no_grad()
    def evaluate(
        self, objective: Objective, step: int, total: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Evaluates the model and compares it with the best one.

        Args:
            objective: without a wrapper for several devices.
            step: steps done.
            total: sums a tensor over processes.

        Returns:
            Metrics: `eval_loss` in nats per scored token; `eval_loss_to_N`, that between the
            previous edge and position N; and `eval_…`, the scores of the task.
        """
        device = next(objective.parameters()).device
        n_parts, count = len(self.edges) - 1, self.config.per_device_train_batch_size
        names = sorted(self.task.score(self.rows.row(0).targets, self.rows.row(0)))
        sums = torch.zeros(2, n_parts, dtype=torch.float64)
        scores = torch.zeros(2, len(names), dtype=torch.float64)
        mine = list(range(processes.rank(), len(self.rows.tokens), processes.size()))
        # Sharded models need the same calls in all processes: a missing row is one without weight.
        each = math.ceil(len(self.rows.tokens) / processes.size())
        for start in range(0, each, count):
            chosen = mine[start : start + count]
            padded = chosen + [0] * (min(count, each - start) - len(chosen))
            nats, predictions = self._read(objective, self.rows.row(*padded).to(device))
            if not chosen:
                continue
            rows, nats = self.rows.row(*chosen), nats[: len(chosen)]
            places = (rows.targets != UNSCORED).double()
            values = torch.stack([nats * places, places]).flatten(1)
            sums.index_add_(1, self._parts[chosen].flatten(), values)
            found = self.task.score(predictions[: len(chosen)], rows)
            scores += torch.tensor(
                [[float(found[n].double().sum()) for n in names], [len(found[n]) for n in names]],
                dtype=torch.float64,
            )
        whole = total(torch.cat([sums.flatten(), scores.flatten()]).to(device)).cpu()
        nats, counts = whole[: 2 * n_parts].view(2, -1)
        values = {"eval_loss": float(nats.sum() / counts.sum())}
        for part, stop in enumerate(self.edges[1:]):
            if counts[part] > 0:
                values[f"eval_loss_to_{stop}"] = float(nats[part] / counts[part])
        for name, right, of in zip(names, *whole[2 * n_parts :].view(2, -1).tolist(), strict=True):
            if of:
                values[f"eval_{name}"] = right / of
        loss = values["eval_loss"]
        if math.isfinite(loss) and (self.best is None or loss < self.best.loss):
            self.best = Best(step, loss)
        return values

    def _read(self, objective: Objective, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses in nats, float64, and predicted ids of rows, `(b, t)` each on the CPU."""
        state = objective.model.init_state(len(batch.tokens))
        nats, predictions = [], []
        for start in range(0, batch.tokens.shape[1], PIECE):
            part = slice(start, start + PIECE)
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
    one, other = training.documents, validation.documents
    same = one.corpus.sha256 == other.corpus.sha256
    both = {*one.corpus.header.sources} & {*other.corpus.header.sources}
    divided = same and {one.part, other.part} == {"training", "held_out"}
    if (same or both) and not divided:
        raise UserError(
            f"validation reads {min(both, default='the data')}, which the run trains on: set "
            "validation=held_out, or give it data of its own"
        )
