"""Shards of a model (FSDP2): dtypes of gathered weights, groups, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from longrnn.cells import Mamba2
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.tasks import Batch
from longrnn.training import sharding
from longrnn.training.objective import Objective
from tests.refusals import naming
from tests.training.runs import tiny

MAMBA2 = {"kind": "mamba2", "d_state": 8, "head_dim": 8}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, over which FSDP2 shards into one piece."""
    place = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def objective(checkpointing: str = "no") -> Objective:
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(32, 16, 2, MAMBA2)).train()
    model.gradient_checkpointing_enable(checkpointing)
    return Objective(model)


def batch() -> Batch:
    """Rows whose last tokens run on a fork of the state, while some weights are gathered."""
    ids = torch.randint(32, (2, 601), generator=torch.Generator().manual_seed(0))
    return Batch(ids[:, :-1], ids[:, 1:], torch.ones(2, dtype=torch.bool), query_length=5)


def step(trained: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss under bfloat16 autocast, and the gradients; rows of three segments."""
    with torch.autocast("cpu", torch.bfloat16):
        output = trained([batch()], trained.init_state(2))
    output.loss.backward()
    gradients = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    return output.loss.detach(), whole


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("checkpointing", ["no", "block", "segment"])
def test_matrices_are_gathered_in_bfloat16_and_all_else_in_float32(checkpointing: str) -> None:
    """Under bf16 the loss has the bits of autocast, and weights and gradients are float32."""
    expected_loss, expected = step(objective())
    trained = objective(checkpointing)
    sharding.shard(trained, sharding.build_mesh("cpu", 1, None), "bf16")
    seen: dict[str, set[torch.dtype]] = {}

    def watch(module: Any, arguments: Any) -> None:
        for name in ("in_proj.weight", "out_proj.weight", "A_log", "dt_bias", "D", "conv1d.weight"):
            owner, _, last = name.rpartition(".")
            weight = getattr(module.get_submodule(owner), last)
            if not isinstance(weight, DTensor):  # gathered
                seen.setdefault(name, set()).add(weight.dtype)

    assert isinstance(trained.model, RecurrentLM)
    for mixer in trained.model.cells:
        assert isinstance(mixer, Mamba2)
        # When the last layer of the mixer runs, everything before it has been gathered.
        mixer.out_proj.register_forward_pre_hook(lambda layer, arguments, m=mixer: watch(m, ()))
    loss, gradients = step(trained)
    narrow = {name for name, dtypes in seen.items() if dtypes == {torch.bfloat16}}
    wide = {name for name, dtypes in seen.items() if dtypes == {torch.float32}}
    assert narrow == {"in_proj.weight", "out_proj.weight"}
    assert wide == {"A_log", "dt_bias", "D", "conv1d.weight"}
    assert torch.equal(loss, expected_loss)
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 2**-7, name  # matrices add up their segments in another precision


@pytest.mark.usefixtures("one_process")
def test_without_mixed_precision_everything_is_float32() -> None:
    """The gradients are those of the model without shards."""
    trained = objective()
    sharding.shard(trained, sharding.build_mesh("cpu", 1, None), "no")
    for one in (whole := objective(), trained):
        one([batch()], one.init_state(2)).loss.backward()
    for (name, theirs), ours in zip(whole.named_parameters(), trained.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)


@pytest.mark.usefixtures("one_process")
def test_whole_tensors_are_gathered_one_at_a_time_and_kept_by_the_writer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process holds two whole tensors on its device; the writer copies each to the CPU."""
    trained = objective()
    sharding.shard(trained, sharding.build_mesh("cpu", 1, None), "no")
    optimizer = torch.optim.AdamW(trained.parameters())
    step(trained)
    optimizer.step()
    on_device: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, gather = 0, DTensor.full_tensor

    class OnDevice(Tensor):
        """A whole tensor on a GPU: `cpu` copies it."""

        def cpu(self, *_: Any) -> Tensor:  # type: ignore[override]
            return self.as_subclass(Tensor).clone()

    def full_tensor(self: DTensor) -> Tensor:
        nonlocal most
        whole = gather(self).clone().as_subclass(OnDevice)
        on_device.add(whole)
        most = max(most, len(on_device))
        return whole

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    trees = {"weights": trained.model.state_dict(), "optimizer": optimizer.state_dict()}
    with torch.no_grad():
        kept = sharding.gathered(trees, keep=True)
        dropped = sharding.gathered(trees, keep=False)
    assert most == 1
    assert not any(isinstance(leaf, DTensor) for leaf in tree_leaves((kept, dropped)))
    assert {type(leaf) for leaf in tree_leaves(kept["weights"])} == {Tensor}
    assert set(dropped["weights"].values()) == {None}
    moments = [entries["exp_avg"] for entries in dropped["optimizer"]["state"].values()]
    assert set(moments) == {None}
    for name, weight in trained.model.state_dict().items():
        assert isinstance(weight, DTensor)
        assert torch.equal(kept["weights"][name], gather(weight)), name


def accelerator(processes: int) -> Any:
    return SimpleNamespace(num_processes=processes, mixed_precision="bf16")


def test_groups_of_unequal_size_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shard_size` divides the number of processes, and applies to shards only."""
    config = tiny("passkey", tmp_path, shard_size=4)
    monkeypatch.setenv("FSDP_VERSION", "2")
    sharding.check(accelerator(8), config)
    with pytest.raises(UserError, match=naming("shard_size", 6)):
        sharding.check(accelerator(6), config)
    with pytest.raises(UserError, match="FSDP2"):
        sharding.prepare(accelerator(8), objective(), config)
