"""Objective and optimizer on many devices: copies of the model (DDP) or shards of it (FSDP2).

Notable choices:
- Sharding is torch's own `fully_shard`, on CPUs and GPUs alike, so that what runs on eight GPUs is
  what a test runs on two CPU processes; accelerate would silently not shard the model on CPUs.
- Mixed precision is autocast in both, so that states and decays keep their dtype.
- Checkpoints hold whole tensors: they load anywhere, whatever wrote them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from longrnn.errors import UserError
from longrnn.models.recurrent import RecurrentLM
from longrnn.training.config import TrainConfig
from longrnn.training.objective import Objective
from longrnn.training.optim import build_optimizer

USE_FSDP = "ACCELERATE_USE_FSDP"
T = TypeVar("T")


def is_requested() -> bool:
    """Whether the launch configuration has `distributed_type: FSDP`."""
    return os.environ.get(USE_FSDP, "false").lower() == "true"


@contextmanager
def unseen_by_accelerate() -> Iterator[None]:
    """Keeps accelerate from sharding the model, which `prepare` does."""
    value = os.environ.pop(USE_FSDP, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[USE_FSDP] = value


def check(accelerator: Accelerator) -> None:
    """Raises UserError for a run that cannot be sharded.

    Raises:
        UserError: another version of FSDP, one process, or float16.
    """
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            "FSDP of version 1 is not supported: set fsdp_config.fsdp_version to 2, as in "
            "configs/accelerate/gpu8_fsdp2.yaml"
        )
    if accelerator.num_processes < 2:
        raise UserError("FSDP shards a model over processes and there is one: launch at least 2")
    if accelerator.mixed_precision == "fp16":
        raise UserError("FSDP does not scale float16 gradients here: set mixed_precision=bf16")


def prepare(accelerator: Accelerator, objective: Objective, config: TrainConfig) -> tuple[Any, Any]:
    """The objective, copied or sharded over the processes, and its optimizer.

    Raises:
        UserError: an unknown optimizer, a pattern that matches no parameter, what `check` refuses.
    """
    if not is_requested():
        return accelerator.prepare(objective, build_optimizer(objective.model, config))
    check(accelerator)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    assert isinstance(objective.model, RecurrentLM)  # the trainer has refused others
    for block in objective.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    register_fsdp_forward_method(objective, "token_losses")
    return objective, accelerator.prepare(build_optimizer(objective.model, config))


def gathered(tree: T) -> T:
    """Replaces shards in nested mappings and lists by whole tensors; all processes must call it."""
    if isinstance(tree, Mapping):
        return {name: gathered(branch) for name, branch in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, list):
        return [gathered(branch) for branch in tree]  # type: ignore[return-value]
    return tree.full_tensor() if isinstance(tree, DTensor) else tree  # type: ignore[return-value]


def sharded_weights(whole: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors cut as those of `like` are; unchanged where those are whole."""
    return {name: _like(tensor, like[name]) for name, tensor in whole.items()}


def sharded_optimizer(whole: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict of whole tensors, cut as the parameters of `optimizer` are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {
            # A count of steps has no axes and belongs to every process.
            name: _like(value, parameters[index]) if value.ndim else value
            for name, value in entries.items()
        }
        for index, entries in whole["state"].items()
    }
    return {**whole, "state": state}


def _like(tensor: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return tensor
    # Every process has read the whole tensor: nothing needs to be sent.
    local = tensor.to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
