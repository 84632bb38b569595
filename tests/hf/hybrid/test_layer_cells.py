"""The cells that exist as layers of Hugging Face models only."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.cells import Cell
from longrnn.errors import UserError
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.model import recurrent_layers
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.mitigations.bind import bind
from tests.contracts.builders import (
    assert_near,
    differentiable,
    generator,
    mitigation_spec,
    random_sizes,
    real_leaves,
)
from tests.hf.foreign import architecture
from tests.hf.hybrid.definitions import LAYERS
from tests.mitigations.definitions import Definition, run_tokens

TIME = 40
PAIRS = [
    (kind, name)
    for kind in LAYERS
    for name, member in MITIGATIONS.items()
    if member.undefined(FAMILIES[kind].cell) is None
]


def layer_and_cell(kind: str, **options: Any) -> tuple[Any, Cell]:
    """A recurrent layer of transformers in float64, and our cell on its weights."""
    model = architecture(kind, **options).double()
    layer = next(iter(recurrent_layers(model).values()))
    return layer, FAMILIES[kind].cell(layer, FAMILIES[kind])


def inputs(cell: Cell, time: int = TIME, rows: int = 2) -> Tensor:
    return torch.randn(rows, time, cell.d_input, generator=generator(5), dtype=torch.float64)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_mitigated_cell_is_its_definition(kind: str, name: str) -> None:
    """Outputs, states and gradients at random splits are those of one token after another."""
    layer, cell = layer_and_cell(kind)
    spec = mitigation_spec(name)
    edit = bind(mitigation(spec), [cell], lambda: "").edits[0]
    x = inputs(cell).requires_grad_()
    start = differentiable(cell.init_state(2))
    chain = Definition([spec], 0, cell.n_heads)
    expected, last = run_tokens(LAYERS[kind], layer, chain, x, start)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    state, outputs = cell.init_state(2, edit), []
    for piece in x.split(random_sizes(TIME, seed=3), dim=1):
        y, state = cell(piece, state, edit)
        outputs.append(y)
    found = torch.cat(outputs, 1)
    assert_near(found, expected, 1e-9)
    assert_near(torch.autograd.grad(found.square().sum(), x)[0], wanted, 1e-8)
    if "window" not in spec:
        for leaf, value in real_leaves(last, "").items():
            assert_near(real_leaves(state, "")[leaf], value, 1e-9, leaf)


@pytest.mark.parametrize("bias", [-1e3, 1e3])
@pytest.mark.parametrize("kind", LAYERS)
def test_both_limits_of_the_decay(kind: str, bias: float) -> None:
    layer, cell = layer_and_cell(kind, **({"gate_soft_cap": 1e6} if kind == "xlstm" else {}))
    with torch.no_grad():
        if kind == "minimax":
            layer.slope_rate.fill_(max(0.0, bias))
        elif kind == "recurrent_gemma":
            layer.rg_lru.recurrent_param.fill_(bias)
        else:
            layer.fgate_preact.bias.fill_(bias)
    x = inputs(cell).requires_grad_()
    chain, start = Definition([], 0, cell.n_heads), cell.init_state(2)
    expected, _ = run_tokens(LAYERS[kind], layer, chain, x, start)
    y, _ = cell(x, start)
    assert_near(y, expected, 1e-9)
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_xlstm_whose_gates_are_closed_has_finite_gradients(dtype: torch.dtype) -> None:
    layer, cell = layer_and_cell("xlstm", gate_soft_cap=1e6)
    layer.to(dtype)
    with torch.no_grad():
        layer.fgate_preact.bias.fill_(-1e3)
        layer.igate_preact.bias.fill_(-1e3)
    x = inputs(cell).to(dtype).requires_grad_()
    y, _ = cell(x, cell.init_state(2))
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()


def test_a_filter_of_steps_that_do_not_vary_is_refused() -> None:
    with pytest.raises(UserError, match="LightningAttention.*same step"):
        open_hugging_face(architecture("minimax")).under("token_filter(threshold=0.1)")
    with pytest.raises(UserError, match="MLSTM.*no step size"):
        open_hugging_face(architecture("xlstm")).under("scale_delta(scale=0.5)")
