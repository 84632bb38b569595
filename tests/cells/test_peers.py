"""RNN, GRU and LSTM equal those of `torch.nn`, with the fused kernel and one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from longrnn.cells import Edit, TorchCell
from longrnn.state import PyTree
from tests.contracts.builders import (
    D_MODEL,
    Spec,
    build_mixer,
    differentiable,
    random_tree,
    real_leaves,
    spec_id,
)
from tests.contracts.subjects import assert_same, cell_outcome, gradients, parameters

pytestmark = pytest.mark.core

BATCH, TIME, D_INPUT = 3, 40, D_MODEL + 2
PEERS: list[tuple[Spec, nn.RNNBase]] = [
    ({"kind": "rnn"}, nn.RNN(D_INPUT, D_MODEL, batch_first=True)),
    (
        {"kind": "rnn", "nonlinearity": "relu"},
        nn.RNN(D_INPUT, D_MODEL, nonlinearity="relu", batch_first=True),
    ),
    ({"kind": "gru"}, nn.GRU(D_INPUT, D_MODEL, batch_first=True)),
    ({"kind": "lstm"}, nn.LSTM(D_INPUT, D_MODEL, batch_first=True)),
]


def peer_outcome(module: nn.RNNBase, x: Tensor, state: PyTree) -> dict[str, Tensor]:
    """What `cell_outcome` gives, of a module of torch with the same weights."""
    x, state = differentiable(x), differentiable(state)
    given = tuple(leaf[None] for leaf in state)
    y, after = module(x, given if len(given) > 1 else state[0][None])
    after = type(state)(*(leaf[0] for leaf in (after if len(given) > 1 else (after,))))
    weights = {f"parameter cell.{n.split()[1]}": v for n, v in parameters(module).items()}
    inputs = {"x": x, **real_leaves(state, "state."), **weights}
    return {"y": y, **real_leaves(after, "final ")} | gradients((y, after), inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=spec_id)
@pytest.mark.parametrize("edit", [None, Edit()], ids=["fused", "stepwise"])
@pytest.mark.parametrize(("spec", "module"), PEERS, ids=spec_id)
def test_equals_torch(
    spec: Spec, module: nn.RNNBase, edit: Edit | None, dtype: torch.dtype
) -> None:
    """The same weights give the same outputs, states and gradients."""
    cell = build_mixer(spec, dtype)
    assert isinstance(cell, TorchCell)
    module.to(dtype).load_state_dict(cell.cell.state_dict())
    x = random_tree(torch.empty(BATCH, TIME, D_INPUT, dtype=dtype), 1)
    state = random_tree(cell.init_state(BATCH), 2)
    expected = peer_outcome(module, x, state)
    assert_same(cell_outcome(cell, x, state, [TIME], edit), expected, dtype)
