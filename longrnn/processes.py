"""The processes that a launcher (accelerate, torchrun) started: they exchange Python objects.

Those of a training run are joined by accelerate. In an evaluation each has its own model and items,
and they are joined by gloo on any device, with torch's own rendezvous; the settings of a launch
configuration that concern training (mixed precision, CPU or GPU) have no effect there.

Without `start`, or with one process, everything here does what a single process needs.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from longrnn.errors import UserError

T = TypeVar("T")

# The variable with the launch that started this process, for the command that continues its work.
LAUNCH = "LONGRNN_LAUNCH"
LAUNCH_HINT = (
    "launch with `longrnn launch --cpu --num_processes 2 COMMAND …`, or with --config_file gpu8 on "
    "eight GPUs"
)
# A process waits this long for the others, which may evaluate longer texts.
PATIENCE = timedelta(days=14)
# The exit code of the processes that only learn that the main process has refused.
REFUSED = 2


_rank, _size = 0, 1


def check_device(device: Any) -> None:
    """Check that torch can use a device.

    Raises:
        UserError: it cannot, or has fewer GPUs than there are processes; or it lacks float64.
    """
    import torch

    if str(device).partition(":")[0] == "mps":
        raise UserError(
            f"device {str(device)!r} has no float64, in which longrnn computes decays and angles: "
            "give cpu"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {str(device)!r} cannot be used here: give cpu, or start fewer processes"
        ) from error


def start() -> None:
    """Joins the processes of the launch; does nothing without a launcher, or if it was called.

    Raises:
        UserError: they cannot find each other; every one of them would do all the work.
    """
    global _rank, _size
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _size > 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
    except ValueError as error:
        raise UserError(f"the processes cannot be joined ({error}): {LAUNCH_HINT}") from error
    _rank, _size = dist.get_rank(), dist.get_world_size()


def rank() -> int:
    """Index of this process; 0 for the main process, which writes results and prints."""
    return _rank


def size() -> int:
    """Number of processes that share the work."""
    return _size


def is_main() -> bool:
    """Whether this process writes results and prints."""
    return _rank == 0


def is_first() -> bool:
    """Whether this is the first process of a launch, also before the processes are joined."""
    return os.environ.get("RANK", "0") == "0"


def local_rank() -> int:
    """Index of this process on its machine, which selects its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if _size > 1 else 0


def share(items: Sequence[T], *keys: Callable[[T], object]) -> list[T]:
    """Return the items of this process; every item belongs to exactly one process.

    Args:
        items: the same in every process.
        keys: items with equal keys stay together, so that they can share work. The first key with
            at least as many values as there are processes is used; without one, every item counts
            by itself.
    """
    for key in keys:
        groups = {value: place for place, value in enumerate(dict.fromkeys(map(key, items)))}
        if len(groups) >= _size:
            return [item for item in items if groups[key(item)] % _size == _rank]
    return list(items[_rank::_size])


def wait() -> None:
    """Wait for all processes."""
    gather(None)


def gather(value: T) -> list[T]:
    """Return the values of all processes, by rank; every process must call this."""
    if _size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * _size
    dist.all_gather_object(values, value)
    return values


def on_main(work: Callable[[], T]) -> T:
    """Run `work` in the main process and return its result in all processes.

    Raises:
        SystemExit: in the other processes, if `work` raises an error in the main process, which
            reports it.
    """
    if _size == 1:
        return work()
    import torch.distributed as dist

    outcome: list[Any] = [None, True]
    try:
        if is_main():
            outcome = [work(), False]
    finally:
        dist.broadcast_object_list(outcome, src=0)
    result, failed = outcome
    if failed:
        raise SystemExit(REFUSED)
    return result
