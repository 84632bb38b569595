"""On long streams float32 stays accurate, and a state keeps its size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from longrnn.ops.ssd import ScanInputs, chunked
from torch import Tensor

from longrnn import state as states
from longrnn.state import leaves
from tests.contracts.builders import (
    assert_near,
    build_mitigated,
    build_model,
    generator,
    random_tokens,
)
from tests.mitigations.definitions import Definition, Spec, StateNorm

pytestmark = pytest.mark.core

HEADS, GROUPS, P, N = 4, 2, 4, 5
MIXER: dict[str, Any] = {"kind": "mamba2", "d_state": N, "head_dim": P, "n_groups": GROUPS}
SPECS: list[Spec] = [
    {"kind": "state_norm", "threshold": [[6.0, 30.0, 90.0, 12.0]]},
    {"kind": "sliding_window", "window": 150},
    {"kind": "forget_more", "decay_scale": 0.9999, "input_scale": 0.75},
]
slow = pytest.mark.slow


def stream(time: int) -> ScanInputs:
    """Float32 inputs of one row, with heads of short to long memory (a thousand tokens)."""
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, time, *shape, generator=randomness)

    # Slower decays would cost a float32 loop its digits: it rounds exp(log_decay) at every token.
    rates = torch.tensor([-3.0, -0.05, -1e-3, -1e-2])
    log_decay = rates * (0.5 + torch.rand(1, time, HEADS, generator=randomness))
    gain = torch.rand(1, time, HEADS, generator=randomness)
    return ScanInputs(normal(HEADS, P), gain, log_decay, normal(GROUPS, N), normal(GROUPS, N))


def loop(definition: Definition, inputs: ScanInputs, h: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and final state by the definition, in float64."""
    group_of_head = [head // (HEADS // GROUPS) for head in range(HEADS)]
    outputs = []
    for token in zip(*(tensor.double().unbind(1) for tensor in inputs), strict=True):
        x, gain, log_decay, B, C = token
        add = (gain[..., None] * x)[..., :, None] * B[:, group_of_head, None, :]
        h = definition.stepped(log_decay.exp()[..., None, None], add, h)
        outputs.append((h * C[:, group_of_head, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), h


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
@pytest.mark.parametrize("time", [4000, pytest.param(100_000, marks=slow)])
@torch.no_grad()
def test_float32_rounding_does_not_add_up(spec: Spec, time: int) -> None:
    """Outputs and states equal float64 to 1e-5 at any length."""
    inputs, start = stream(time), torch.zeros(1, HEADS, P, N)
    definition = Definition([spec], layer=0, n_heads=HEADS)
    expected, final = loop(definition, inputs, start.double())
    (member,) = definition.members
    if isinstance(member, StateNorm):
        share = torch.cat(member.rescaled).double().mean((0, 2, 3))
        assert ((share > 0.1) & (share < 0.999)).any(), share

    model = build_mitigated([spec], MIXER, dtype=torch.float32, n_layers=1)
    (edit,) = model.edits
    carry = edit.init_carry(model.cells[0], 1)
    outputs, state, sizes = [], start, [1, 62, 3, 1000]
    sizes += [4096] * ((time - sum(sizes)) // 4096)
    sizes += [time - sum(sizes)]
    for piece in zip(*(tensor.split(sizes, dim=1) for tensor in inputs), strict=True):
        edited, carry = edit.edit_inputs(ScanInputs(*piece), carry)
        y, state, carry = edit.scan(edited, state, carry, chunked.ssd)
        assert y.dtype == state.dtype == torch.float32
        outputs.append(y)
    ours = torch.cat(outputs, dim=1)
    for head in range(HEADS):
        assert_near(ours[:, :, head], expected[:, :, head], 1e-5, f"y of head {head}")
        assert_near(state[:, head], final[:, head], 1e-5, f"state of head {head}")


def held(state: Any) -> int:
    """Bytes of memory that a state keeps alive, counting shared memory once."""
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for _, leaf in leaves(state)
    }
    return sum(storages.values())


@pytest.mark.parametrize("window", [1, 5, 64, 100, 300])
@pytest.mark.parametrize("mixer", [MIXER, "lstm"], ids=["mamba2", "lstm"])
@torch.no_grad()
def test_a_window_needs_constant_memory(mixer: Any, window: int) -> None:
    """The carry neither grows with the stream nor keeps the inputs of a long call alive."""
    model = build_mitigated([{"kind": "sliding_window", "window": window}], mixer)
    state = model.init_state(1)
    size, most = states.nbytes(state), 0
    for time in (1, 90, 700 if mixer is MIXER else 300, 1):
        state = model(random_tokens(1, time), state, keep=0).state
        assert states.nbytes(state) == size
        most = max(most, held(state))
    assert most <= 1.2 * size + 20_000


def test_memory_grows_by_one_chunk_per_64_tokens_of_window() -> None:
    """64 more tokens of window cost the inputs of one chunk and one state per layer."""
    sizes = [
        states.nbytes(
            build_mitigated([{"kind": "sliding_window", "window": 64 * k}], MIXER).init_state(1)
        )
        for k in range(2, 6)
    ]
    inputs = 64 * (HEADS * P + 2 * HEADS + GROUPS * N)  # x, gain, log_decay and B
    one = 2 * 8 * (inputs + HEADS * P * N + HEADS)
    assert [after - before for before, after in pairwise(sizes)] == [one] * 3


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=lambda spec: spec["kind"])
def test_mitigations_without_memory_have_no_carry(spec: Spec) -> None:
    """Their states add only the tag that identifies the mitigation."""
    ours, plain = build_mitigated([spec], MIXER, n_layers=1), build_model(MIXER, n_layers=1)
    assert states.nbytes(ours.init_state(3)) == states.nbytes(plain.init_state(3)) + 3 * 8
