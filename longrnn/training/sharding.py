"""Objective and optimizer on many devices: copies of the model (DDP) or shards of it (FSDP2).

Notable choices:
- Sharding is torch's own `fully_shard`, on CPUs and GPUs alike, so that what runs on eight GPUs is
  what a test runs on two CPU processes; accelerate would silently not shard the model on CPUs.
- Mixed precision is autocast in both, so that states and decays keep their dtype. Under bf16 the
  matrices of the blocks, which autocast would round in each process, are gathered in bfloat16:
  the same numbers in half of the bytes. All other weights, A_log and dt_bias among them, are
  gathered in float32. Gradients are added up over the processes in float32.
- With `shard_size` the model is sharded within groups of processes and copied between them (HSDP).
- Weights gathered in bfloat16 are kept until the backward pass has used them: a long row passes
  each block once per segment, and would gather its weights again for each of them.
- Checkpoints hold whole tensors: they load anywhere, whatever wrote them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from longrnn.errors import UserError
from longrnn.models.recurrent import RecurrentLM
from longrnn.training.config import TrainConfig
from longrnn.training.objective import Objective
from longrnn.training.optim import build_optimizer

USE_FSDP = "ACCELERATE_USE_FSDP"


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


def check(accelerator: Accelerator, config: TrainConfig) -> None:
    """Raises UserError for a run that cannot be sharded.

    Raises:
        UserError: another version of FSDP, one process, float16, or groups of unequal size.
    """
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            "FSDP of version 1 is not supported: set fsdp_config.fsdp_version to 2, as in the "
            "bundled configuration gpu8_fsdp2"
        )
    if accelerator.num_processes < 2:
        raise UserError("FSDP shards a model over processes and there is one: launch at least 2")
    if accelerator.mixed_precision == "fp16":
        raise UserError("FSDP does not scale float16 gradients here: set mixed_precision=bf16")
    if config.shard_size is not None and accelerator.num_processes % config.shard_size:
        raise UserError(
            f"shard_size={config.shard_size} does not divide the {accelerator.num_processes} "
            "processes: set the number of GPUs of one machine, or leave it out"
        )


def prepare(accelerator: Accelerator, objective: Objective, config: TrainConfig) -> tuple[Any, Any]:
    """The objective, copied or sharded over the processes, and its optimizer.

    Raises:
        UserError: an unknown optimizer, a pattern that matches no parameter, what `check` refuses,
            or `shard_size` without shards.
    """
    if not is_requested():
        if config.shard_size is not None:
            raise UserError(
                f"shard_size={config.shard_size} applies to shards (FSDP2) only: launch with "
                "--config_file gpu8_fsdp2, or leave it out"
            )
        return accelerator.prepare(objective, build_optimizer(objective.model, config))
    check(accelerator, config)
    mesh = build_mesh(accelerator.device.type, accelerator.num_processes, config.shard_size)
    shard(objective, mesh, accelerator.mixed_precision)
    return objective, accelerator.prepare(build_optimizer(objective.model, config))


def build_mesh(device: str, processes: int, shard_size: int | None) -> DeviceMesh:
    """All processes in one group of shards, or in several groups that hold copies of each other."""
    if shard_size in (None, processes):
        return init_device_mesh(device, (processes,))
    shape = (processes // shard_size, shard_size)
    return init_device_mesh(device, shape, mesh_dim_names=("copies", "shards"))


def shard(objective: Objective, mesh: DeviceMesh, mixed_precision: str) -> None:
    """Shards the weights of an objective in place, those of a block as one group.

    Args:
        objective: of a recurrent model.
        mesh: of the processes.
        mixed_precision: under `bf16` the linear layers of a block are groups of their own.
    """
    assert isinstance(objective.model, RecurrentLM)  # the trainer has refused others
    narrow = mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in objective.model.blocks:
        for layer in block.modules() if narrow else ():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=not narrow)
    fully_shard(objective, mesh=mesh)
    register_fsdp_forward_method(objective, "token_losses")


def gathered(tree: Any, *, keep: bool) -> Any:
    """Replaces shards in nested mappings and lists by whole tensors on the CPU.

    One tensor after another is gathered and copied, so that the device holds a single whole tensor
    at a time.

    Args:
        tree: of the same structure in all processes, all of which call this; whatever is not a
            shard stays as it is.
        keep: whether this process uses the result; elsewhere None stands for every shard.
    """
    if isinstance(tree, Mapping):
        return {name: gathered(branch, keep=keep) for name, branch in tree.items()}
    if isinstance(tree, list):
        return [gathered(branch, keep=keep) for branch in tree]
    if not isinstance(tree, DTensor):
        return tree
    whole = tree.full_tensor()  # every process takes part
    return whole.cpu() if keep else None


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
