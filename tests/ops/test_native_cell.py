"""Everything between the projections of a Mamba-2 in C++ against its parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from longrnn.cells import Cell
from longrnn.cells.mamba2 import Mamba2, Mamba2State
from tests.contracts.builders import assert_near, build_mixer, generator, random_tree
from tests.ops.test_native import needs_kernels, threads

__all__ = ["threads"]  # a fixture


@needs_kernels
@pytest.mark.parametrize("time", [1, 2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "options",
    [
        {"d_state": 5, "head_dim": 4, "n_groups": 2},
        {"d_state": 16, "head_dim": 8, "conv_bias": False, "d_conv": 1},
        {"d_state": 7, "head_dim": 16, "dt_limit": [0.01, 0.05]},
    ],
    ids=str,
)
def test_the_fused_cell_equals_its_parts(options: dict[str, object], time: int) -> None:
    """Outputs, both states, and with gradients those of the input, all weights and both states."""
    mixer, parts = (
        build_mixer({"kind": "mamba2", "backend": backend, **options})
        for backend in ("native", "chunked")
    )
    assert isinstance(mixer, Mamba2)
    parts.load_state_dict(mixer.state_dict())
    x = torch.randn(2, time, mixer.d_input, generator=generator(1), dtype=torch.float64)
    state: Mamba2State = random_tree(mixer.init_state(2), 2)
    assert mixer._fused(mixer.in_proj(x), state) is not None
    wanted = results(parts, x, state)
    with torch.no_grad():
        y, fused = mixer(x, state)
    found = results(mixer, x, state)
    for name, tensor in wanted.items():
        assert_near(found[name], tensor, 1e-12, name)
    for name, tensor in {"y": y, "conv": fused.conv, "ssm": fused.ssm}.items():
        assert torch.equal(tensor, found[name])
    assert torch.equal(found["conv"], wanted["conv"])


def results(mixer: Cell, x: Tensor, state: Mamba2State) -> dict[str, Tensor]:
    """Outputs and states of a mixer, and the gradients of a fixed functional of all of them."""
    leaves = {"x": x.clone().requires_grad_()}
    leaves |= {f"before {k}": v.clone().requires_grad_() for k, v in state._asdict().items()}
    y, after = mixer(leaves["x"], Mamba2State(leaves["before conv"], leaves["before ssm"]))
    outputs = {"y": y, "conv": after.conv, "ssm": after.ssm}
    randomness = generator(9)
    loss = torch.zeros((), dtype=torch.float64)
    for one in outputs.values():
        loss = loss + (one * torch.randn(one.shape, generator=randomness, dtype=x.dtype)).sum()
    inputs = leaves | dict(mixer.named_parameters())
    found = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    return outputs | dict(zip(inputs, found, strict=True))


@needs_kernels
@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_gradients_of_the_cell_by_rounding_only() -> None:
    mixer = build_mixer({"kind": "mamba2", "backend": "native", "d_state": 8, "head_dim": 8})
    x = torch.randn(2, 150, mixer.d_input, generator=generator(1), dtype=torch.float64)
    state: Mamba2State = random_tree(mixer.init_state(2), 2)
    torch.set_num_threads(1)
    wanted = results(mixer, x, state)
    for count in (2, 3):
        torch.set_num_threads(count)
        for name, tensor in results(mixer, x, state).items():
            assert_near(tensor, wanted[name], 1e-13, name)


@needs_kernels
def test_second_derivatives_of_the_cell_are_those_of_its_parts() -> None:
    native_cell, parts = (
        build_mixer({"kind": "mamba2", "backend": backend, "d_state": 3, "head_dim": 8})
        for backend in ("native", "chunked")
    )
    parts.load_state_dict(native_cell.state_dict())
    x = torch.randn(1, 6, parts.d_input, generator=generator(1), dtype=torch.float64)
    found = []
    for mixer in (native_cell, parts):
        leaf, state = x.clone().requires_grad_(), mixer.init_state(1)
        (first,) = torch.autograd.grad(
            mixer(leaf, state)[0].square().sum(), leaf, create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), [leaf, *mixer.parameters()],
                                         materialize_grads=True))  # fmt: skip
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-11)


@needs_kernels
def test_training_with_a_row_that_is_not_finite() -> None:
    """The outputs and gradients of the other rows are those without it."""
    mixer = build_mixer({"kind": "mamba2", "backend": "native", "d_state": 5, "head_dim": 4})
    x = torch.randn(3, 70, mixer.d_input, generator=generator(1), dtype=torch.float64)
    x[1, 30] = math.nan
    found = []
    for rows in ([0, 1, 2], [0, 2]):
        leaf = x[rows].clone().requires_grad_()
        y, _ = mixer(leaf, mixer.init_state(len(rows)))
        (grad,) = torch.autograd.grad(y.nan_to_num().square().sum(), leaf)
        found.append((y, grad))
    (y, grad), (clean_y, clean_grad) = found
    assert y[1, 30:].isnan().any()
    assert_near(y[[0, 2]], clean_y, 1e-12)
    assert_near(grad[[0, 2]], clean_grad, 1e-12)


@needs_kernels
@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fused_cell_reads_narrow_weights_as_they_are_now(dtype: torch.dtype, time: int) -> None:
    """It equals the cell in float32 with the same weights, after a change in place too."""
    options = {"kind": "mamba2", "backend": "native", "d_state": 8, "head_dim": 8, "n_groups": 2}
    narrow = build_mixer(options).to(dtype)
    assert isinstance(narrow, Mamba2)
    state: Mamba2State = random_tree(narrow.init_state(2), 2)
    # Wider than needed, so that a slice of it is not contiguous.
    wide_x = torch.randn(2, time, 2 * narrow.in_proj.out_features, generator=generator(1))
    projected = wide_x.to(dtype)[..., ::2]
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for weight in (narrow.conv1d.weight, narrow.A_log, narrow.norm.weight):
                weight.data.mul_(factor)  # a write that torch does not count
            wide = build_mixer(options).float()
            wide.load_state_dict(narrow.state_dict())
            found = narrow._fused(projected, state)
            assert isinstance(wide, Mamba2)
            wanted = wide._fused(projected.float(), state._replace(conv=state.conv.float()))
        assert found is not None
        assert wanted is not None
        assert found[0].dtype == found[1].conv.dtype == dtype
        assert_near(found[0].double(), wanted[0].double(), torch.finfo(dtype).eps)
        assert torch.equal(found[1].ssm, wanted[1].ssm)
        assert torch.equal(found[1].conv, wanted[1].conv.to(dtype))
