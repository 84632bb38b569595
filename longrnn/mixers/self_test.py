"""A short test of a Mamba-2 layer on this machine: the operations around the recurrence too."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.mixers.mamba2 import Mamba2
from longrnn.ops.ssd import PARTIAL
from longrnn.ops.ssd.self_test import PARTIAL_TOLERANCE, TOLERANCE, relative_error
from longrnn.state import clone, leaves, tree_map

WIDTH, TOKENS = 32, 150


class LayerFinding(NamedTuple):
    """What a self-test of a layer found.

    Attributes:
        error: the largest relative error of outputs, states and gradients against the loop over
            tokens in float64, on the CPU.
        passed: whether it is within the tolerance.
    """

    error: float
    passed: bool


def layer_self_test(backend: str, device: str | torch.device = "cpu") -> LayerFinding:
    """Compare a layer in float32 with the same layer in float64: many tokens, then a single one."""
    wanted = _results("reference", torch.float64, "cpu")
    found = _results(backend, torch.float32, device)
    pairs = zip(found, wanted, strict=True)
    errors = torch.tensor([relative_error(ours, exact) for ours, exact in pairs])
    tolerances = PARTIAL_TOLERANCE if backend in PARTIAL else TOLERANCE
    passed = bool((errors <= tolerances[torch.float32]).all())  # a NaN does not pass
    return LayerFinding(float(errors.max()), passed)


def _results(backend: str, dtype: torch.dtype, device: str | torch.device) -> list[Tensor]:
    """Outputs and states without gradients, and the gradients of all weights and of the input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = Mamba2(WIDTH, WIDTH, d_state=16, head_dim=16, backend=backend)
        drawn = torch.randn(1, TOKENS, WIDTH)
        like = layer.init_state(1)
        start = tree_map(lambda leaf: torch.randn(leaf.shape), like)
    layer, x = layer.to(device, dtype), drawn.to(device, dtype)
    state = tree_map(lambda leaf: leaf.to(device, dtype), start)
    with torch.no_grad():
        y, after = layer(x, clone(state))
        token, last = layer(x[:, -1:], after)
    x.requires_grad_()
    outputs, _ = layer(x, state)
    weights = [x, *layer.parameters()]
    gradients = torch.autograd.grad(outputs.square().mean(), weights)
    return [y, token, *(leaf for _, leaf in leaves((after, last))), *gradients]
