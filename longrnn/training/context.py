"""How the processes of a run divide its work: rows, and the tokens of each row.

`context_parallel_size` consecutive processes form a context group. They read the same rows, each a
share of their tokens (`longrnn.models.context`); different groups read different rows. Weights are
the same in all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.context import ContextGroup


class Mesh(NamedTuple):
    """The place of a process in a run.

    Attributes:
        rank: which part of the rows this process reads.
        size: number of parts, each with the same number of rows.
        group: the processes that read the same part; None if each reads its own.
        device: of the tensors that the processes of a group can exchange.
    """

    rank: int
    size: int
    group: ContextGroup | None
    device: torch.device = torch.device("cpu")

    @property
    def saves_states(self) -> bool:
        """Whether this process writes the carried states of its rows, which its group shares."""
        return self.group is None or self.group.is_first

    def total_of_rows(self, total: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`total`, which sums over processes, for numbers that those of one group share."""
        copies = 1 if self.group is None else self.group.size
        return lambda part: total(part) / copies

    def in_all(self, rows: Tensor) -> Tensor:
        """`(b,)` bool: whether each row has the property in all processes that read it."""
        if self.group is None:
            return rows
        found = self.group.gather(rows.long().to(self.device))
        return found.bool().all(0).to(rows.device)


def mesh_of(accelerator: Accelerator, size: int) -> Mesh:
    """The place of this process, for context groups of `size` processes; all must call this.

    Raises:
        UserError: the number of processes is not a multiple of `size`.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    if size == 1:
        return Mesh(rank, world, None)
    if world % size:
        raise UserError(
            f"context_parallel_size={size} does not divide the {world} process"
            f"{'es' if world > 1 else ''} of this launch: launch {size * max(1, world // size)} "
            "processes, for example with `longrnn launch --cpu --num_processes "
            f"{size * max(1, world // size)} train …`"
        )
    import torch.distributed as dist

    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    group = ContextGroup.of(groups[rank // size])
    return Mesh(rank // size, world // size, group, accelerator.device)
