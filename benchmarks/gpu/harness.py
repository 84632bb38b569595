"""What the parts of the benchmark share: checks, timing, budgets, and errors as results."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.record import FAILED, MEASURED, NOT_RUN, PASSED, RAN, Record, Row
from benchmarks.gpu.sizes import Cost, Sizes
from longrnn.files import one_line

# Seconds that all repeats of one timed call may take together.
SECONDS = 2.0
# Bytes that are written before each timed call: more than the caches of a GPU hold. Meanwhile the
# host starts the kernels of the call, so that its own time does not count.
FLUSHED = 2**28


class DeviceLostError(Exception):
    """A kernel has failed in a way after which this process cannot use the device."""


class Bench:
    """One part of the benchmark in progress.

    A value that needs a clock or the memory counter of a GPU is None in a dry run.

    Args:
        record: receives the rows.
        part: name of the part.
        sizes: of the run.
        device: of the run.
        deadline: `time.monotonic()` at which the part must have ended.
    """

    def __init__(
        self, record: Record, part: str, sizes: Sizes, device: torch.device, deadline: float
    ) -> None:
        self.record, self.part, self.sizes, self.device = record, part, sizes, device
        self.deadline = deadline

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def attempt(
        self,
        name: str,
        work: Callable[[], object],
        *,
        seconds: float = 1.0,
        again: bool = False,
    ) -> None:
        """Runs a piece of the part; an error of it becomes a failed row.

        A piece that an earlier process of the part has begun is left out.

        Args:
            name: of the piece, and of the row if it does not run to its end.
            work: adds its own rows.
            seconds: what it is expected to take; it is not started if less is left.
            again: whether each process of the part needs what it does.

        Raises:
            DeviceLostError: later pieces need another process.
        """
        if not self.sizes.dry and self.seconds_left < seconds:
            self.skip(name, f"about {seconds:.0f} s needed, {self.seconds_left:.0f} s left")
            return
        if not self.record.begin(self.part, name) and not again:
            return
        try:
            work()
            self._synchronize()  # an error of a kernel belongs to the piece that started it
        except Exception as error:
            # A benchmark of kernels that may fail in any way: the error is the result.
            traceback.print_exc()
            self.add(name, FAILED, reason=f"{type(error).__name__}: {one_line(error)}")
            if self.is_lost():
                raise DeviceLostError(name) from error
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_lost(self) -> bool:
        """Whether every later call of the device fails in this process."""
        try:
            self._synchronize()
        except Exception:  # of any type: torch has several for errors of a device
            return True
        return False

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def add(self, name: str, status: str, **values: Any) -> None:
        self.record.add(Row(self.part, name, status, **values))

    def skip(self, name: str, reason: str, **limit: Any) -> None:
        """Records that something was not run, and why; `limit` is what it would have had."""
        self.add(name, NOT_RUN, reason=reason, **limit)

    def fits(self, name: str, bytes_needed: float) -> bool:
        """Whether so much device memory is free; records a row that was not run where it is not."""
        if self.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < bytes_needed:
            self.skip(name, f"needs {bytes_needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free")
        return free >= bytes_needed

    def check(self, name: str, error: float, limit: float) -> None:
        """Records an error, which passes up to the limit; NaN and infinity fail."""
        if not math.isfinite(error):
            self.add(name, FAILED, limit=limit, unit="error", reason=f"the error is {error}")
            return
        status = PASSED if error <= limit else FAILED
        self.add(name, status, value=error, limit=limit, unit="error")

    def check_equal(self, name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """Records whether tensors have the same bits."""
        differing = sum(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        self.check(name, float(differing), 0.0)

    def milliseconds(self, call: Callable[[], object]) -> float | None:
        """The median time of a call on the device; in a dry run it is called once, untimed.

        Caches are flushed before each call. A slow call is repeated less often: all repeats
        together take about SECONDS. The first two calls do not count, if there are others.
        """
        if self.sizes.dry:
            call()
            return None
        call()  # compiles kernels
        flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=self.device)
        times = [_timed(call, flushed)]
        repeats = min(self.sizes.repeats, int(1e3 * SECONDS / times[0]))
        times += [_timed(call, flushed) for _ in range(repeats)]
        return median(times[1:] or times)

    def on_host(self, call: Callable[[], object], *, repeats: int = 1) -> float | None:
        """The median time of a long call on the host's clock, the device included, in ms.

        None in a dry run, which calls it once.

        Args:
            call: has run before, so that its kernels are compiled.
            repeats: of the call, fewer if they would take more than SECONDS.
        """
        if self.sizes.dry:
            call()
            return None
        times: list[float] = []
        while len(times) < repeats and sum(times) < 1e3 * SECONDS:
            torch.cuda.synchronize(self.device)
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize(self.device)
            times.append(1e3 * (time.perf_counter() - begun))
        return median(times)

    def figure(
        self,
        name: str,
        value: float | None,
        unit: str,
        *,
        cost: Cost | None = None,
        limit: float | None = None,
    ) -> None:
        """Records a figure, with the bound of its cost, and a limit where it has one."""
        status = _status(value, value, limit)
        bound = self._bound(cost)
        self.add(name, status, value=value, unit=unit, bound=bound, limit=limit)

    def compare(
        self,
        name: str,
        value: float | None,
        other: float | None,
        against: str,
        *,
        unit: str = "ms",
        cost: Cost | None = None,
        limit: float | None = None,
    ) -> None:
        """Records a figure, its ratio to another one, and a limit of that ratio."""
        ratio = None if value is None or other is None else value / other
        missing = value is not None and other is None
        self.add(
            name,
            _status(value, ratio, limit),
            value=value,
            unit=unit,
            bound=self._bound(cost),
            ratio=ratio,
            against=against,
            limit=limit,
            limit_of="ratio",
            reason=f"there is no time of {against} to compare with" if missing else "",
        )

    def _bound(self, cost: Cost | None) -> float | None:
        ceilings = self.record.ceilings
        known = {"bytes_per_second", "flops_per_second"} <= set(ceilings)
        return cost.bound_ms(ceilings) if cost is not None and known else None

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        """Largest memory of tensors since `reset_peak`, in GiB."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**30


def _timed(call: Callable[[], object], flushed: Tensor) -> float:
    """Milliseconds of one call on the current GPU, after its caches were filled with `flushed`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.zero_()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _status(value: float | None, limited: float | None, limit: float | None) -> str:
    """The status of a figure whose limit applies to `limited`, which may be the figure itself."""
    if value is None:
        return RAN  # a dry run
    if limit is None or limited is None:
        return MEASURED
    return PASSED if limited <= limit else FAILED


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest entry of `exact`."""
    exact = exact.to(torch.float64)
    difference = (ours.to(exact.device, torch.float64) - exact).abs().max()
    return float(difference / exact.abs().max().clamp(min=1e-300))
