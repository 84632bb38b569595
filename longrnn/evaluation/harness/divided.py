"""What lm-eval asks of a model whose processes share the documents of its tasks.

Every process evaluates every n-th document; lm-eval gathers the scores in the main process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

from longrnn import processes


class Divided(ABC):
    """The part of an lm-eval model that connects its processes."""

    @abstractmethod
    def own_counts(self) -> Counter[str]:
        """Return what this process counted."""

    def join_processes(self) -> None:
        """Join the processes of the launch, if there are several."""
        processes.start()
        self._rank, self._world_size = processes.rank(), processes.size()
        self._device = torch.device("cpu")  # of the numbers that lm-eval exchanges
        self._everywhere: Counter[str] = Counter()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return this process's value once per process.

        lm-eval compares the numbers of requests in order to repeat requests in processes that have
        fewer. Ours do not wait for each other in a request, and repeated ones would be recorded.
        """
        return torch.stack([tensor] * processes.size())

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return what lm-eval measured in all processes, by rank, in the main process.

        lm-eval calls this after the last request, so the counts of all processes are added up here.
        A process may have had no document of a task; it then has no values of its metrics.
        """
        self._everywhere = sum(processes.gather(self.own_counts()), Counter())
        found = processes.gather(obj)
        if isinstance(obj, dict) and all(isinstance(value, dict) for value in obj.values()):
            found = [{task: defaultdict(list, own) for task, own in one.items()} for one in found]
        return found if processes.rank() == dst else None

    def counts(self) -> Counter[str]:
        """Return what was counted: at the end of an evaluation, in all processes together."""
        return self._everywhere or self.own_counts()
