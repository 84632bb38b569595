"""Batches as a pure function of (seed, step, micro-batch, process), so that runs can resume."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks import Batch, Task
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import uses_streams
from longrnn.training.seeds import mix


class Source:
    """The batches of one process of a run.

    The global batch does not depend on the number of processes, each of which takes its own rows of
    it: a run on two processes sees the rows of a run on one with twice the batch. Streams are
    numbered over all micro-batches and processes, and stay on their process: no state ever moves.

    Args:
        task: draws the batches.
        config: provides lengths, batch size and seed.
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self, task: Task, config: TrainConfig, rank: int, world_size: int) -> None:
        self.task, self.config = task, config
        self.rank, self.world_size = rank, world_size
        self.streams = uses_streams(config.initial_state)
        self.in_order = self.streams or task.reads_in_order
        rows = config.per_device_train_batch_size
        self.n_streams = config.gradient_accumulation_steps * world_size * rows

    def segments(self, step: int, micro: int) -> list[Batch]:
        """The rows of this process for one micro-batch of a step.

        Consecutive segments of streams, `segments_per_step` of them, or one batch of independent
        rows.
        """
        if not self.in_order:
            return [self._sample(step, micro)]
        count = self.config.segments_per_step
        return [self._segment(step * count + index, micro) for index in range(count)]

    def begins(self, steps: range, micro: int) -> Tensor:
        """`(b,)` bool: rows of this process in which a document begins during these steps."""
        rows = torch.zeros(self.config.per_device_train_batch_size, dtype=torch.bool)
        for step in steps:
            for batch in self.segments(step, micro):
                rows |= batch.is_document_start.view(len(rows), -1).any(1)
        return rows

    def check(self) -> None:
        """Raises UserError for lengths that the task cannot make."""
        length = self.config.length
        if length.grow_steps or length.sampling != "fixed" or self.config.batch_tokens:
            if self.in_order:
                raise UserError(
                    f"the task {self.config.task['kind']} reads documents in rows of length.max "
                    "tokens: leave out length.sampling, length.grow_steps and batch_tokens"
                )
            self.task.sample(1, length=length.min, generator=torch.Generator())
        self.segments(0, 0)

    def layout(self) -> str:
        """How documents are laid out in rows and what is left out, in words; may be empty."""
        length, seed = self.config.length.max, self.config.seed
        if self.streams:
            return self.task.layout(self.n_streams, length=length, seed=seed)
        if self.in_order:
            return self.task.whole_layout(self.n_streams, length=length, seed=seed)
        return self.task.left_out(length)

    def most_rows(self) -> int | None:
        """Rows per process and micro-batch for which there are documents; None for any number."""
        config = self.config
        most = self.task.most_rows(config.length.max, seed=config.seed, is_carried=self.streams)
        others = config.gradient_accumulation_steps * self.world_size
        return None if most is None else most // others

    def longest(self) -> int:
        """Tokens of the longest row, or document where a state is carried, that a run may see."""
        config = self.config
        if not self.streams:
            row = self.task.sample(1, length=config.length.max, generator=torch.Generator())
            return row.tokens.shape[1]
        segment = self._segment(0, 0)
        steps = config.max_steps * config.segments_per_step
        segments = min(steps, self.task.longest_document(config.length.max))
        # Only the last segment's query adds positions: the others run on forks.
        return segments * config.length.max + segment.query_length

    def _sample(self, step: int, micro: int) -> Batch:
        seed = mix(self.config.seed, step, micro)
        length = self._length(step, random.Random(seed))
        rows = self.config.per_device_train_batch_size
        if self.config.batch_tokens is not None:
            rows = max(1, min(rows, self.config.batch_tokens // length))
        own = range(self.rank * rows, (self.rank + 1) * rows)
        return self.task.sample_part(own, rows * self.world_size, length=length, seed=seed)

    def _segment(self, index: int, micro: int) -> Batch:
        config = self.config
        rows = config.per_device_train_batch_size
        first = (micro * self.world_size + self.rank) * rows
        streams = range(first, first + rows)
        length = config.length.max
        read = self.task.segment if self.streams else self.task.whole_documents
        return read(streams, index, n_streams=self.n_streams, length=length, seed=config.seed)

    def _length(self, step: int, rng: random.Random) -> int:
        length = self.config.length
        grown = min(1.0, (step + 1) / length.grow_steps) if length.grow_steps else 1.0
        drawn = rng.random() if length.sampling == "log_uniform" else 1.0
        return round(length.min * (length.max / length.min) ** (grown * drawn))
