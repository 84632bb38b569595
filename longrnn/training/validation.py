"""Validation during training: the loss on held-out rows, also beyond the training length.

Notable choices:
- Rows are drawn once, from a seed that is not that of the run: runs with different seeds are
  compared on the same rows. Every row starts from the zero state.
- A position is that of a token in its document: packed rows hold several documents, each of which
  starts from the zero state.
- Losses are summed by position and over processes, so every process sees the same numbers and
  makes the same decisions; one process and two agree to rounding.
- Rows are read in pieces, and only some logits (`longrnn.ops.loss`) exist at a time:
  memory does not grow with the length of a row, except for a transformer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longrnn.corpus import HEADER
from longrnn.errors import LengthError, UserError
from longrnn.models.recurrent import RecurrentLM
from longrnn.tasks import Batch, SequenceTask, Task
from longrnn.tasks.base import UNSCORED
from longrnn.tasks.held_out import HELD_OUT, TRAINING
from longrnn.training.components import Component
from longrnn.training.config import TrainConfig
from longrnn.training.objective import Objective, rows_of
from longrnn.training.origins import Selection
from longrnn.training.seeds import mix

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from longrnn.training.models import Trained

# Tokens of a row that are read at a time.
PIECE = 4096
# Options of tasks by which documents are laid out in rows.
LAYOUT = ("packing", "max_segments", "truncate")
# By default, validation rows are this many times as long as the longest training row.
BEYOND = 16


@dataclass(frozen=True)
class Best:
    """The best evaluation: the number of steps, and the value of `metric_for_best_model`."""

    step: int
    value: float


class Validation(Component):
    """Measures the loss on held-out rows and remembers the best evaluation.

    Args:
        config: has a `validation`.
        model: in training; its number of positions limits the default length.
        training_task: whose data must not be validated on.
        task: of `config.validation`.
        rank: of this process.
        world_size: number of processes.

    Attributes:
        edges: positions between which losses are averaged: 0, the training length, twice that, …
        best: the best evaluation; None before the first.
        stale: evaluations since the best one.

    Raises:
        UserError: rows cannot be made, overlap with the training data, or have nothing to score
            at the positions of `metric_for_best_model`.
    """

    name = "validation"

    def __init__(
        self,
        config: TrainConfig,
        model: Trained,
        training_task: Task,
        task: Task,
        rank: int,
        world_size: int,
    ) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.task = task
        _refuse_overlap(config, training_task, self.task)
        self.length = _length(config, model, self.task)
        self.rows = self._draw_longest()
        # A transformer starts every row from the zero state, so it reads rows as a whole.
        whole = self.rows.tokens.shape[1]
        self.piece = PIECE if isinstance(model, RecurrentLM) else whole
        if not isinstance(model, RecurrentLM) and self.rows.inner_starts() is not None:
            raise UserError(
                "a transformer attends to all documents of a row, which share no state here: set "
                "validation.packing=false"
            )
        trained = min(config.length.max, self.length)
        doubled = (trained * 2**k for k in range(self.length.bit_length()))
        self.edges = [0, *(edge for edge in doubled if edge < whole), max(whole, self.length)]
        self.best: Best | None = None
        self.stale = 0
        # Between which edges each token lies, `(rows, t)`.
        ends = torch.tensor(self.edges[1:])
        self._parts = torch.bucketize(_positions(self.rows).contiguous(), ends, right=True)
        self._check_metric()

    def due(self, step: int) -> bool:
        """Whether to evaluate after so many steps."""
        return step % self.config.eval_steps == 0 or step == self.config.max_steps

    @property
    def exhausted(self) -> bool:
        """Whether the run ends early, since too many evaluations brought no improvement."""
        patience = self.config.early_stopping_patience
        return patience is not None and self.stale >= patience

    def evaluate(
        self,
        objective: Objective,
        step: int,
        device: torch.device,
        total: Callable[[Tensor], Tensor],
    ) -> dict[str, float]:
        """Evaluates the model and compares it with the best one.

        Args:
            objective: without a wrapper for several devices.
            step: steps done.
            device: of the model.
            total: sums a tensor over processes.

        Returns:
            Metrics: `eval_loss` in nats per scored token; `eval_loss_to_N`, that between the
            previous edge and position N; and `eval_…`, the scores of the task.
        """
        training = objective.training
        objective.eval()
        try:
            values = self._measure(objective, device, total)
        finally:
            objective.train(training)
        value = values[self.metric]
        if math.isfinite(value) and (self.best is None or value < self.best.value):
            self.best, self.stale = Best(step, value), 0
        else:
            self.stale += 1
        return values

    @property
    def metric(self) -> str:
        """The key of `metric_for_best_model` in the metrics."""
        places = {"loss_inside": self.edges[1], "loss_longest": self.edges[-1]}
        place = places.get(self.config.metric_for_best_model)
        return "eval_loss" if place is None else f"eval_loss_to_{place}"

    def content(self) -> dict[str, Any]:
        best = None if self.best is None else (self.best.step, self.best.value)
        return {"best": best, "stale": self.stale}

    def restore(self, content: dict[str, Any]) -> None:
        best = content.get("best")
        self.best = None if best is None else Best(*best)
        self.stale = content.get("stale", 0)

    def _draw_longest(self) -> Batch:
        """The rows; by default they are shorter where the held-out data has too few tokens."""
        wanted = self.length
        while True:
            try:
                rows = self._draw()
                break
            except LengthError:
                if self.config.eval_length is not None or self.length // 2 < self.config.length.max:
                    raise
                self.length //= 2
        if self.length < wanted and self.rank == 0:
            logger.warning(
                f"the validation data has no row of {wanted:,} tokens: the loss is measured on "
                f"rows of {self.length:,}"
            )
        return rows

    def _draw(self) -> Batch:
        """The rows of all processes."""
        count = self.config.eval_samples
        if isinstance(self.task, SequenceTask):
            return self.task.evaluation_batch(0, count, length=self.length)
        generator = torch.Generator().manual_seed(mix("validation"))
        try:
            rows = self.task.sample(count, length=self.length, generator=generator)
        except LengthError as error:
            raise LengthError(
                f"validation rows of eval_length={self.length} cannot be made, {error}"
            ) from error
        if rows.repeat is not None:
            raise UserError("validation rows cannot be repeated: set max_repeat=1 in validation")
        if rows.is_token is None:
            return rows
        used = int(rows.is_token.any(0).nonzero().max()) + 1  # what follows is padding in all rows
        fields = rows._asdict().items()
        rectangles = {name: x for name, x in fields if isinstance(x, Tensor) and x.ndim == 2}
        return rows._replace(**{name: x[:, :used] for name, x in rectangles.items()})

    def _check_metric(self) -> None:
        scored = self._parts[self.rows.targets != UNSCORED]
        known = {"eval_loss"} | {f"eval_loss_to_{self.edges[k + 1]}" for k in scored.tolist()}
        if self.metric not in known:
            raise UserError(
                f"metric_for_best_model={self.config.metric_for_best_model} has no scored token in "
                f"the validation rows of {self.length} tokens: set metric_for_best_model=loss"
            )

    @torch.no_grad()
    def _measure(
        self, objective: Objective, device: torch.device, total: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        n_parts = len(self.edges) - 1
        sums = torch.zeros(2, n_parts, dtype=torch.float64)
        scores: dict[str, float] = {}
        n_rows, count = 0, self.config.per_device_eval_batch_size
        mine = list(range(self.rank, len(self.rows.tokens), self.world_size))
        # Sharded models need the same calls in all processes: a missing row is one without weight.
        each = math.ceil(len(self.rows.tokens) / self.world_size)
        for start in range(0, each, count):
            chosen = mine[start : start + count]
            padded = chosen + [0] * (min(count, each - start) - len(chosen))
            nats, predictions = self._read(objective, padded, device)
            kept = slice(0, len(chosen))
            rows = _take(self.rows, padded[kept])
            places = (rows.targets != UNSCORED).double()
            values = torch.stack([nats[kept] * places, places]).flatten(1)
            sums.index_add_(1, self._parts[chosen].flatten(), values)
            if chosen:
                for name, found in self.task.score(predictions[kept], rows).items():
                    scores[name] = scores.get(name, 0.0) + float(found.double().sum())
                n_rows += len(chosen)
        names = sorted(self._score_names())
        parts = [sums.flatten(), torch.tensor([n_rows, *(scores.get(n, 0.0) for n in names)])]
        whole = total(torch.cat([part.double() for part in parts]).to(device)).cpu()
        nats, counts = whole[: 2 * n_parts].view(2, n_parts)
        rows, *sums_of_scores = whole[2 * n_parts :].tolist()
        values = {"eval_loss": float(nats.sum() / counts.sum())}
        for part, stop in enumerate(self.edges[1:]):
            if counts[part] > 0:
                values[f"eval_loss_to_{stop}"] = float(nats[part] / counts[part])
        return values | {f"eval_{n}": s / rows for n, s in zip(names, sums_of_scores, strict=True)}

    def _read(
        self, objective: Objective, rows: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Losses in nats, float64, and predicted ids of rows, `(b, t)` each on the CPU."""
        batch = _take(self.rows, rows).to(device)
        state = objective.model.init_state(len(rows))
        nats, predictions = [], []
        for start in range(0, batch.tokens.shape[1], self.piece):
            part = slice(start, start + self.piece)
            losses, ids, state = objective.token_losses(
                batch.tokens[:, part], batch.targets[:, part], state, rows_of(batch, part)
            )
            nats.append(losses.double().cpu())
            predictions.append(ids.cpu())
        return torch.cat(nats, 1), torch.cat(predictions, 1)

    def _score_names(self) -> list[str]:
        one = _take(self.rows, [0])
        return list(self.task.score(one.targets, one))


def _positions(rows: Batch) -> Tensor:
    """The position of each token in its document, as far as its row holds it; `(b, t)` int64."""
    time = torch.arange(rows.tokens.shape[1]).expand(rows.tokens.shape)
    starts = rows.inner_starts()
    return time if starts is None else time - time.where(starts, 0).cummax(1).values


def _take(batch: Batch, rows: list[int]) -> Batch:
    """Some rows of a batch."""
    fields: list[Any] = [field[rows] if isinstance(field, Tensor) else field for field in batch]
    return Batch(*fields)


def _length(config: TrainConfig, model: Trained, task: Task) -> int:
    """Tokens of a validation row; by default one that holds any document with answers."""
    limit = model.max_length
    if config.eval_length is None:
        segments = task.longest_document(config.length.max) if task.reads_answers else BEYOND
        wanted = segments * config.length.max
        return wanted if limit is None else min(wanted, limit)
    if limit is not None and config.eval_length > limit:
        raise UserError(
            f"the model has {limit} positions and validation rows have eval_length="
            f"{config.eval_length} tokens: set eval_length={limit} or less"
        )
    return config.eval_length


def _refuse_overlap(config: TrainConfig, training: Task, validation: Task) -> None:
    """Refuses text that the run trains on."""
    if _divided(config.task, config.validation):
        return
    same = training.data_sha256() and training.data_sha256() == validation.data_sha256()
    names = [_named(spec) for spec in (config.task, config.validation)]
    common = sorted(names[0] & names[1])
    if common or same:
        what = common[0] if common else "the whole data"
        raise UserError(
            f"validation reads {what}, which the run trains on: give it text of its own"
        )


def _divided(task: Mapping[str, Any], validation: Mapping[str, Any]) -> bool:
    """Whether the two read the two parts of the same data."""
    specs = [
        {key: value for key, value in spec.items() if key not in ("part", *LAYOUT)}
        for spec in (task, validation)
    ]
    return specs[0] == specs[1] and (task.get("part"), validation.get("part")) == (
        TRAINING,
        HELD_OUT,
    )


def _named(spec: Mapping[str, Any]) -> set[str]:
    """The files, folders and splits of datasets that a task reads."""
    data = spec.get("data") or []
    listed = [*(spec.get("files") or []), *([data] if isinstance(data, str) else data)]
    selection = Selection(*(spec.get(f, d) for f, d in Selection._field_defaults.items()))
    return {_one_named(Path(one).expanduser(), selection) for one in map(str, listed)}


def _one_named(path: Path, selection: Selection) -> str:
    """A file or folder as an absolute path; a dataset with what is read of it."""
    if path.is_file() or (path / HEADER).is_file():
        return str(path.resolve())
    where = path.resolve() if path.exists() else path
    return " ".join([str(where), *(str(part) for part in selection if part is not None)])
