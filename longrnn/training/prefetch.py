"""Batches that are made in the background, while the device computes the step before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import torch

from longrnn.tasks import Batch

Key: TypeAlias = tuple[int, int]


class Prefetch:
    """The micro-batches of a run, each made while the one before is in use.

    Batches are pure functions of step and micro-batch, so what was made ahead and not used needs no
    place in a checkpoint. All batches are made in one thread, one after another.

    Args:
        make: returns the segments of a step and micro-batch, such as `Source.segments`.
        n_micro: micro-batches of a step.
        last: steps of the run; none is made beyond.
        device: that computes; batches for a GPU are put into page-locked memory, from which they
            are copied while the GPU computes.
        ahead: number of micro-batches that are made ahead.
    """

    def __init__(
        self,
        make: Callable[[int, int], list[Batch]],
        n_micro: int,
        last: int,
        device: torch.device,
        *,
        ahead: int = 2,
    ) -> None:
        self._make, self._n_micro, self._last = make, n_micro, last
        self._device, self._ahead = device, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="longrnn-batches")
        self._made: dict[Key, Future[list[Batch]]] = {}
        self._closed = False

    def segments(self, step: int, micro: int) -> list[Batch]:
        """The segments of a micro-batch, on the host.

        Raises:
            UserError: what making them raises.
        """
        if self._closed:
            return self._make_on_host(step, micro)
        wanted = self._following(step, micro)
        for key in [key for key in self._made if key not in wanted]:
            self._made.pop(key).cancel()
        for key in wanted:
            if key not in self._made:
                self._made[key] = self._thread.submit(self._make_on_host, *key)
        return self._made.pop((step, micro)).result()

    def close(self) -> None:
        """Ends the thread, after the batch that is being made; later ones are made when wanted."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _following(self, step: int, micro: int) -> list[Key]:
        """A micro-batch and those after it that are made ahead."""
        first = step * self._n_micro + micro
        keys = [divmod(index, self._n_micro) for index in range(first, first + self._ahead + 1)]
        return [keys[0], *(key for key in keys[1:] if key[0] < self._last)]

    def _make_on_host(self, step: int, micro: int) -> list[Batch]:
        batches = self._make(step, micro)
        return [batch.pinned() for batch in batches] if self._device.type == "cuda" else batches
