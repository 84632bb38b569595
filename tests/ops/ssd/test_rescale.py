"""state_norm at every size of inputs, states and limits, against a float64 loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longrnn.ops.ssd import ScanInputs, chunked
from longrnn.ops.ssd.rescale import rescaled_ssd
from torch import Tensor

from longrnn.mitigations import Mitigated, mitigation
from longrnn.state import leaves, tree_map
from tests.contracts.builders import assert_near, build_model, generator, random_state
from tests.contracts.limits import limited_loop

SIZES = [1e-30, 1e-19, 1e-10, 1.0, 1e10, 1e18, 1e19, 1e25, 1e37]
LIMITS = torch.tensor([0.5, 2.0, 1e-3, 30.0], dtype=torch.float64)
TIME = 70


def draw(dtype: torch.dtype) -> tuple[ScanInputs, Tensor]:
    randomness = generator(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=randomness, dtype=torch.float64).clamp(-3, 3)

    x, gain = normal(TIME, 4, 3), normal(TIME, 4)
    B, C = normal(TIME, 2, 5), normal(TIME, 2, 5)
    log_decay = -0.1 * normal(TIME, 4).square()
    inputs = ScanInputs(*(tensor.to(dtype) for tensor in (x, gain, log_decay, B, C)))
    return inputs, normal(4, 3, 5).to(dtype)


def assert_as_the_loop(inputs: ScanInputs, state: Tensor, limit: Tensor, sizes: list[int]) -> None:
    expected = limited_loop(inputs, state, limit)
    outputs = []
    for piece in zip(*(tensor.split(sizes, dim=1) for tensor in inputs), strict=True):
        y, state = rescaled_ssd(ScanInputs(*piece), state, limit, chunked.ssd)
        outputs.append(y)
    tolerance = 1e-10 if state.dtype == torch.float64 else 2e-5
    for name, ours, theirs in zip(
        ("y", "state"), (torch.cat(outputs, 1), state), expected, strict=True
    ):
        for head in range(4):
            axis = 2 if name == "y" else 1
            one, other = ours.select(axis, head), theirs.select(axis, head)
            assert_near(one, other, tolerance, f"{name} of head {head}")


@pytest.mark.parametrize("sizes", [[TIME], [1, 5, 64]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("field", ["x", "gain", "B", "state", "one token", "x and 1/B"])
def test_sizes(field: str, size: float, dtype: torch.dtype, sizes: list[int]) -> None:
    """Every head keeps its limit, at sizes whose squares float32 cannot hold too."""
    inputs, state = draw(dtype)
    if field == "state":
        state = size * state
    elif field == "one token":
        x = inputs.x.clone()
        x[:, 20] *= size
        inputs = inputs._replace(x=x)
    elif field == "x and 1/B":
        inputs = inputs._replace(x=size * inputs.x, B=inputs.B / size)
    else:
        inputs = inputs._replace(**{field: size * getattr(inputs, field)})
    assert_as_the_loop(inputs, state, LIMITS, sizes)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_limits_of_any_size(dtype: torch.dtype, size: float) -> None:
    """Beside inputs and states of their size."""
    inputs, state = draw(dtype)
    inputs = inputs._replace(x=size * inputs.x)
    assert_as_the_loop(inputs, size * state, size * LIMITS, [TIME])


@pytest.mark.parametrize("size", [1e10, 1e19, 1e37])
def test_a_large_state_gets_the_norm_of_its_limit(size: float) -> None:
    """Neither 0 nor what it was."""
    inputs, state = draw(torch.float32)
    inputs = inputs._replace(x=0 * inputs.x, log_decay=0 * inputs.log_decay)
    _, after = rescaled_ssd(inputs, size * state, LIMITS, chunked.ssd)
    norms = after.double().flatten(2).norm(dim=-1)
    torch.testing.assert_close(norms, LIMITS.expand(2, -1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [1e-3, 0.5])
@pytest.mark.parametrize(
    "mixer", ["mamba2", "lstm", "gru", "rnn", {"kind": "rnn", "nonlinearity": "relu"}], ids=str
)
def test_states_of_every_cell(mixer: Any, threshold: float, size: float) -> None:
    """A float32 model from a state of any size, as the same model in float64 has it."""

    def run(dtype: torch.dtype) -> list[Tensor]:
        with torch.no_grad():
            model = build_model(mixer, dtype=torch.float32).to(dtype)
            limited = Mitigated(model, mitigation({"kind": "state_norm", "threshold": threshold}))
            layers = tree_map(
                lambda leaf: (size * leaf).to(dtype), random_state(build_model(mixer), 2).layers
            )
            if isinstance(mixer, str) and mixer == "mamba2":
                conv = random_state(model, 2).layers
                layers = tuple(b._replace(ssm=a.ssm) for a, b in zip(layers, conv, strict=True))
            start = limited.init_state(2)._replace(layers=layers)
            tokens = torch.arange(9).remainder(7).repeat(2, 1)
            logits, after = limited(tokens, start)
            return [logits, *(leaf for _, leaf in leaves(after.layers))]

    for ours, theirs in zip(run(torch.float32), run(torch.float64), strict=True):
        assert_near(ours, theirs, 5e-5)
