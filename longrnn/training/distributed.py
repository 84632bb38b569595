"""Devices and processes of a run: accelerate, sharding with FSDP2, trackers, and signals.

Notable choices:
- Sharding is torch's own `fully_shard`, on CPUs and GPUs alike, so that what runs on eight GPUs is
  what a test runs on two CPU processes; accelerate would silently not shard the model on CPUs.
- Mixed precision is autocast in both, so that states and decays keep their dtype. Weights are
  gathered, and gradients added up over the processes, in float32.
- Checkpoints hold whole tensors: they load anywhere, whatever wrote them.
"""

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from longrnn import processes
from longrnn.config import flat
from longrnn.errors import UserError, require
from longrnn.files import one_line
from longrnn.training.config import TrainConfig
from longrnn.training.objective import Objective
from longrnn.training.optim import build_optimizer

USE_FSDP = "ACCELERATE_USE_FSDP"
# Keeps process groups until the process ends: the destructor of gloo's groups sometimes misses a
# wake-up and waits forever. The command line exits without destructors.
_KEPT: list[Any] = []


def build_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of a run; joins the processes of a launch (`longrnn.processes`).

    Raises:
        UserError: the processes cannot be joined, or the tracker's package is missing.
    """
    if config.report_to != "none":
        require(config.report_to, f"report_to={config.report_to}")
    AcceleratorState._reset_state()  # an earlier run of this process may have another precision
    sharded = os.environ.pop(USE_FSDP, None)  # unseen by accelerate: `prepare` shards the model
    try:
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=config.mixed_precision,
            # The trainer divides by the number of micro-batches itself.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=None if config.report_to == "none" else config.report_to,
            project_dir=config.output_dir,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=processes.PATIENCE)],
        )
    except ValueError as error:
        raise UserError(f"the run cannot be launched ({error}): {processes.LAUNCH_HINT}") from error
    finally:
        if sharded is not None:
            os.environ[USE_FSDP] = sharded
    processes.start()
    return accelerator


def prepare(accelerator: Accelerator, objective: Objective, config: TrainConfig) -> tuple[Any, Any]:
    """The objective, copied (DDP) or sharded (FSDP2) over the processes, and its optimizer.

    Args:
        accelerator: of `build_accelerator`.
        objective: of the model, on its device.
        config: the run.

    Raises:
        UserError: the launch asks for a version of FSDP other than 2, or for shards of one process.
    """
    model = objective.model
    if os.environ.get(USE_FSDP, "false").lower() != "true":
        unused = model.has_unused_weights
        handler: Any = DistributedDataParallelKwargs(find_unused_parameters=unused)
        accelerator.ddp_handler = handler
        prepared = accelerator.prepare(objective, build_optimizer(model, config))
    else:
        if os.environ.get("FSDP_VERSION", "1") != "2" or accelerator.num_processes < 2:
            raise UserError(
                "a model is sharded by FSDP of version 2 over several processes: launch at least "
                "2, with a configuration such as the bundled gpu8_fsdp2"
            )
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        # The weights of each block are one group, and all others, also those that blocks share,
        # are another.
        uses = Counter(weight for block in model.blocks for weight in block.parameters())
        alone = [b for b in model.blocks if all(uses[weight] == 1 for weight in b.parameters())]
        for part in (*alone, objective):
            fully_shard(part, mesh=mesh)
        model.is_sharded = True
        register_fsdp_forward_method(objective, "token_losses")
        prepared = objective, accelerator.prepare(build_optimizer(model, config))
    if accelerator.num_processes > 1:
        _KEPT.append(prepared)
    return prepared


def gathered(tree: Any) -> Any:
    """Replaces shards in nested mappings by whole tensors on the CPU.

    All processes must call this. One tensor after another is gathered and copied to the main
    process, so that the device holds a single whole tensor at a time; in the other processes None
    stands for every shard.
    """
    if isinstance(tree, Mapping):
        return {name: gathered(branch) for name, branch in tree.items()}
    if not isinstance(tree, DTensor):
        return tree
    whole = tree.full_tensor()  # every process takes part
    return whole.cpu() if processes.is_main() else None


def sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every process has read, cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    local = whole.to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def means(accelerator: Accelerator, values: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """The mean of values `(n,)` by name, over processes; a name without any is left out."""
    pairs = [(float(sum(x.sum() for x in v)), sum(map(len, v))) for v in values.values()]
    totals: Any = accelerator.reduce(torch.tensor(pairs, device=accelerator.device), "sum")
    rows = zip(values, totals.tolist(), strict=True)
    return {name: total / count for name, (total, count) in rows if count}


@contextmanager
def trackers(accelerator: Accelerator, config: TrainConfig) -> Iterator[None]:
    """Within this context the tracker `report_to` is open, in its own folder in `output_dir`."""
    folder = Path(config.output_dir)
    if config.report_to != "none" and processes.is_main():
        named = {"name": folder.resolve().name}
        options = {"wandb": {"dir": str(folder), **named}, "trackio": named}
        values = {key: str(value) for key, value in flat(config.model_dump(mode="json")).items()}
        try:
            with redirect_stdout(sys.stderr):  # standard output is that of the command
                accelerator.init_trackers("longrnn", config=values, init_kwargs=options)
        except Exception as error:  # of the tracker, such as a missing login
            raise UserError(
                f"{config.report_to} cannot be opened ({one_line(error)}): set it up, or choose "
                f"report_to=none, and go on with --resume {folder}"
            ) from error
    try:
        yield
    finally:
        # `end_training` would also end the process group, in which `finetune` evaluates.
        for tracker in accelerator.trackers:
            tracker.finish()


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Within this context, Ctrl-C and SIGTERM do not interrupt a step; yields those received.

    Only the main thread gets signals: a run in another one receives none.
    """
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in ((signal.SIGINT, signal.SIGTERM) if is_main else ())
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
