"""The simulated GPU refuses what a real one refuses, and computes what a CPU computes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.simulated_cuda import simulated, waits

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def device() -> Iterator[None]:
    with simulated(fused=False):
        yield


def gpu(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda")


def test_tensors_know_their_device() -> None:
    found = [gpu(2), torch.ones(2).cuda(), torch.ones(2).to("cuda:0"), torch.ones(2).to(gpu(1))]
    found += [gpu(2) * 2, torch.zeros_like(gpu(2)), gpu(2).new_tensor([1.0]), gpu(2, 3).sum(0)]
    found += [torch.tensor([1.0], device="cuda"), gpu(2).to(torch.float64), *gpu(4).split(2)]
    assert all(one.is_cuda and one.device == torch.device("cuda", 0) for one in found)
    back = [gpu(2).cpu(), gpu(2).to("cpu"), gpu(2).to("cpu", torch.float64)]
    assert not any(one.is_cuda for one in back)


PAIRS = [torch.add, torch.matmul, torch.outer, lambda a, b: torch.cat([a, b])]


@pytest.mark.parametrize("run", PAIRS)
def test_two_devices_in_one_operation_raise(run: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        run(gpu(3), torch.ones(3))
    assert (gpu(3) + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a scalar of the CPU may join


def test_indices_of_the_gpu_do_not_index_the_cpu() -> None:
    index = torch.tensor([0])
    assert gpu(3)[index].is_cuda
    with pytest.raises(RuntimeError, match="indices"):
        torch.ones(3)[index.cuda()]


def test_a_generator_draws_on_its_own_device() -> None:
    probabilities = gpu(3)
    with pytest.raises(RuntimeError, match="generator"):
        torch.multinomial(probabilities, 1, generator=torch.Generator())
    torch.multinomial(probabilities, 1, generator=torch.Generator("cuda"))


def test_waits_are_counted_and_refused() -> None:
    with waits() as found:
        (gpu(2) * 3).sum()
        assert found == []
        assert gpu(2).sum().item() == 2
        bool(gpu(2).all())
        gpu(2).cpu()
        gpu(2)[gpu(2) > 0]
    assert len(found) == 4
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            gpu(2).tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_repeats_operations_with_the_numbers_of_its_capture() -> None:
    buffer, number, frozen = gpu(2), 3, torch.tensor(10.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = buffer * number + frozen
    number += 1
    frozen += 1
    buffer.copy_(torch.tensor([5.0, 7.0], device="cuda"))
    graph.replay()
    assert found.tolist() == [25, 31]


@pytest.mark.parametrize("run", [lambda x: x.sum().item(), lambda x: torch.ones(1).cuda(), bool])
def test_a_graph_captures_neither_waits_nor_copies(run: Callable[..., Any]) -> None:
    x, graph = gpu(1), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph):
        run(x)


def test_modules_move_and_learn() -> None:
    """Tied weights stay tied, gradients lie on the device, and those of a copy pass through it."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second).to("cuda")
    assert first.weight is second.weight
    assert first.weight.is_cuda
    model(gpu(2, 3)).split([1, 2], -1)[0].sum().backward()
    model(gpu(2, 3)).sum().cpu().backward()
    assert first.weight.grad is not None
    assert first.weight.grad.is_cuda
    with pytest.raises(RuntimeError, match="same device"):
        model(torch.ones(2, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert pickle.loads(pickle.dumps(first.weight.detach())).shape == (3, 3)


def test_autocast_of_the_gpu_casts_its_products() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (gpu(2, 2) @ gpu(2, 2)).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cuda")
    assert (gpu(2, 2) @ gpu(2, 2)).dtype == torch.float32
