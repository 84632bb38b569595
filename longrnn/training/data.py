"""Batches as a pure function of (seed, step, micro-batch, process): a resume needs no replay."""

from __future__ import annotations

import hashlib
import random

import torch

from longrnn.tasks import Batch, Task
from longrnn.training.config import TrainConfig


class Source:
    """The batches of one process of a run.

    Every process draws the same global batch and takes its own rows, so a run on two processes
    sees the rows of a run on one with twice the batch.

    Args:
        task: where batches come from.
        config: lengths, batch size, seed.
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self, task: Task, config: TrainConfig, rank: int, world_size: int) -> None:
        self.task, self.config = task, config
        self.rank, self.world_size = rank, world_size

    def batch(self, step: int, micro: int) -> Batch:
        """The rows of this process for one micro-batch of a step."""
        return self._segment(step, micro) if self.config.carry else self._sample(step, micro)

    def check(self) -> None:
        """Raises UserError for lengths that the task cannot make."""
        length = self.config.length
        if not self.config.carry and length.sampling != "fixed":
            self.task.sample(1, length=length.min, generator=torch.Generator())
        self.batch(0, 0)

    def longest(self) -> int:
        """Tokens of the longest row, or document where a state is carried, that a run may see."""
        config = self.config
        if not config.carry:
            row = self.task.sample(1, length=config.length.max, generator=torch.Generator())
            return row.tokens.shape[1]
        segment = self.batch(0, 0)
        segments = min(config.max_steps, self.task.max_segments)
        # Only the last segment's question counts: the others are asked on forks.
        return segments * config.length.max + segment.tail

    def _sample(self, step: int, micro: int) -> Batch:
        seed = _mix(self.config.seed, step, micro)
        length = self._length(step, random.Random(seed))
        rows = self.config.per_device_train_batch_size
        if self.config.batch_tokens is not None:
            rows = max(1, min(rows, self.config.batch_tokens // length))
        generator = torch.Generator().manual_seed(seed)
        batch = self.task.sample(rows * self.world_size, length=length, generator=generator)
        return batch.rows(self.rank * rows, (self.rank + 1) * rows)

    def _segment(self, step: int, micro: int) -> Batch:
        rows = self.config.per_device_train_batch_size
        first = (micro * self.world_size + self.rank) * rows
        lanes = range(first, first + rows)
        length = self.config.length.max
        return self.task.segment(lanes, step, length=length, seed=self.config.seed)

    def _length(self, step: int, rng: random.Random) -> int:
        length = self.config.length
        if length.sampling == "fixed":
            return length.max
        grown = min(1.0, (step + 1) / length.grow_steps) if length.grow_steps else 1.0
        return round(length.min * (length.max / length.min) ** (grown * rng.random()))


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    digest = hashlib.sha256("/".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
