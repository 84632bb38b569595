"""Fits the weights that set time scales to texts far longer than those of training.

Few numbers are trained, and everything else is frozen: per head an addition to log |A| and one to
the bias of its step, per unit of an LSTM or a GRU one to the bias of the forget gate; with `select`
also additions to the weights that make steps and gates from tokens (`Cell.step_weights`). Training
is truncated backpropagation through time: rows continue with the state that they ended with, so
that the loss is that of states at positions up to the target length. Sources of the parts: arXiv
2509.19633 (rates by gradients), 2507.02782 (few hundred steps with passed states).

Notable choices:
- A segment has at least the training length, and so many tokens that the steps pass the target
  length once. Rows begin a new document every target length, at different steps.
- Documents with a key (`longrnn.data.passkey`) grow to the target length: by closed-form repetition
  of segments where the recurrence is linear, else by more segments. With `select` they grow sooner,
  and one segment may be repeated up to that length.
- The learning rate rises over the first twentieth of the steps, and falls to a tenth by a cosine.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from longrnn.data import Batch, Passkey
from longrnn.data.batch import row_starts
from longrnn.diagnostics.fitted import Additions, begin, listed
from longrnn.diagnostics.job import METHODS, Job, Members
from longrnn.errors import UserError
from longrnn.evaluation.texts import begun, text_of
from longrnn.mitigations.time_scales import write_additions
from longrnn.models import LanguageModel
from longrnn.options import Count, Options
from longrnn.progress import Progress
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import Carry, Context
from longrnn.training.objective import Objective
from longrnn.training.optim import set_learning_rate
from longrnn.training.repeat import can_repeat
from longrnn.units import format_length

# A token with gradients costs as much as this many without.
GRADIENT_COST = 4
# Segments of a document with a key whose segments are repeated in closed form.
REPEATED_SEGMENTS = 8
# Tokens of a segment, of which a step holds the activations, if the training length is not longer.
LONGEST_SEGMENT = 16384


@METHODS.register("fit")
class TimeScaleFit(Options):
    """Fits additions to the weights that set the time scales of a model.

    Attributes:
        steps: of the optimizer.
        rows: streams of text that are read at once.
        keys: rows of documents with a passkey, whose loss is that of the answers, beside them.
        select: train the weights that make steps and gates from tokens too.
        learning_rate: of the additions to log |A|; that of biases is half of it.
        weights_learning_rate: of the additions that `select` trains.
    """

    steps: Count = 300
    rows: Count = 4
    keys: Annotated[int, Field(ge=0)] = 0
    select: bool = False
    learning_rate: PositiveFloat = 0.05
    weights_learning_rate: PositiveFloat = 0.002

    def tokens(self, job: Job) -> float:
        segment = max(job.train_length, job.target_length / self.steps)
        return GRADIENT_COST * self.steps * (self.rows + self.keys) * segment

    def run(self, job: Job, _: str) -> Members:
        """Return the mapping of which `mitigation` makes `time_scales`.

        Raises:
            UserError: the cells have no such weights, the texts are too short, or the loss is not
                finite.
        """
        if self.select and job.weights_file is None:
            raise UserError("fit(select=true) writes a file: give Job a weights_file")
        model: Any = job.model  # recurrent, or a hybrid
        layers = [Additions.of(cell, select=self.select) for cell in model.cells]
        with torch.enable_grad(), _frozen(model):
            self._train(job, layers)
        found: dict[str, Any] = {
            "rate": listed([additions.rate for additions in layers]),
            "bias": listed([additions.bias for additions in layers]),
        }
        found = {name: by_layer for name, by_layer in found.items() if any(by_layer)}
        if self.select:
            found |= self._write(job, layers)
        return [{"kind": "time_scales", **found}]

    def _write(self, job: Job, layers: Sequence[Additions]) -> dict[str, str]:
        """Write the additions to weights, and return the options that name the file."""
        assert job.weights_file is not None
        known = job._replace(model=job.model.under(None)).known(job.weights_file)
        weights = {layer: additions.weights for layer, additions in enumerate(layers)}
        digest = write_additions(job.weights_file, weights, known)
        return {"weights": str(job.weights_file), "sha256": digest}

    def _train(self, job: Job, layers: Sequence[Additions]) -> None:
        """Take all steps of the optimizer, which change the additions."""
        text = _stretches(job, self.rows)
        begin(job, text, layers, keys=self.keys > 0)
        model: Any = job.model.under(None)
        objective = Objective(model)
        groups = self._groups(layers)
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        rates = {"learning_rate": 1.0, "min_lr_rate": 0.1, "warmup_steps": max(1, self.steps // 20)}
        schedule = TrainConfig.model_validate(rates | {"max_steps": self.steps})
        context, device = Context(job.model.init_state), job.model.init_state(1).position.device
        starts, length = [Carry(context), Carry(context)], self._segment_length(job)
        task = self._keyed_task(job, length) if self.keys else None
        with Progress("fit", self.steps, unit="tokens", quiet=job.quiet) as progress:
            for step in range(self.steps):
                pairs = zip(layers, job.model.edits, strict=True)
                model._edits = [additions.added(edit) for additions, edit in pairs]
                batches = [_text_batch(text, step, length, job)]
                if task is not None:
                    how: dict[str, Any] = {"length": length, "seed": 0, "carried": True}
                    batches.append(task.batch(step, range(self.keys), of=self.keys, **how))
                total = 0.0
                for start, on_host in zip(starts, batches, strict=False):
                    batch = on_host.to(device)
                    output = objective([batch], start.before(batch, step, 0))
                    output.loss.backward()
                    start.after(output.state, 0)
                    total += float(output.loss.detach())
                if not math.isfinite(total):
                    raise UserError(
                        f"the loss of step {step + 1} is not finite: give a smaller learning_rate"
                    )
                trained = [number for group in groups for number in group["params"]]
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                set_learning_rate(optimizer, step, schedule)
                optimizer.step()
                optimizer.zero_grad()
                tokens = sum(batch.tokens.numel() for batch in batches)
                progress.advance(1, tokens, f"loss {total:.3f}")

    def _groups(self, layers: Sequence[Additions]) -> list[dict[str, Any]]:
        """Return what is trained, by learning rate."""
        trained = [
            (self.learning_rate, [additions.rate for additions in layers]),
            (self.learning_rate / 2, [additions.bias for additions in layers]),
            (self.weights_learning_rate, [w for a in layers for w in a.weights.values()]),
        ]
        return [
            {"params": [each for each in numbers if each is not None], "scale": rate}
            for rate, numbers in trained
        ]

    def _keyed_task(self, job: Job, length: int) -> Passkey:
        """Return the documents with keys, in the text of the job."""
        repeats = can_repeat(job.model)
        segments = max(1, job.target_length // length)
        few = min(REPEATED_SEGMENTS, segments) if repeats else segments
        farthest = segments if self.select else max(1, 2 * segments // few)
        parts = [text_of(document.tokens, job.tokenizer) for document in job.documents]
        return Passkey(
            job.tokenizer,
            "\n".join(parts),
            text_weight=0.0,
            max_segments=few,
            max_repeat=farthest if repeats else 1,
            grow_steps=self.steps // (3 if self.select else 2),
        )

    def _segment_length(self, job: Job) -> int:
        """Return how many tokens of each row a step reads."""
        length = max(job.train_length, math.ceil(job.target_length / self.steps))
        if length > max(job.train_length, LONGEST_SEGMENT):
            raise UserError(
                f"{self.steps} steps towards {format_length(job.target_length)} tokens would hold "
                f"segments of {length:,} tokens with their gradients: give "
                f"fit(steps={math.ceil(job.target_length / LONGEST_SEGMENT)}) or more"
            )
        return length


def _stretches(job: Job, rows: int) -> Tensor:
    """The texts as equal stretches that follow each other, `(rows, t)`."""
    whole = torch.cat([document.tokens for document in job.documents])
    length = len(whole) // rows
    if length <= job.train_length:
        raise UserError(
            f"the texts have {len(whole):,} tokens, too few for {rows} streams of more than the "
            "training length: give more text, or fewer rows"
        )
    return whole[: rows * length].view(rows, length)


def _text_batch(text: Tensor, step: int, length: int, job: Job) -> Batch:
    """The segment of a step from each stretch, which is read in a circle.

    Rows begin a document every target length, each at other steps.
    """
    rows, size = text.shape
    at = (step * length + torch.arange(length + 1)) % size
    segments = max(1, job.target_length // length)
    begins = (step + torch.arange(rows) * segments // rows) % segments == 0
    begins |= torch.tensor(step == 0)
    tokens = text[:, at]
    tokens = tokens.where(~begins[:, None], begun(tokens, job.tokenizer.bos_id))
    starts = row_starts(tokens[:, :-1], begins)
    return Batch(tokens[:, :-1], tokens[:, 1:], starts)


@contextmanager
def _frozen(model: LanguageModel) -> Iterator[None]:
    """A context in which no weight of a model has a gradient."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
