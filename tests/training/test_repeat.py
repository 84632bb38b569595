"""Closed-form segment repetition, through a model and through the objective."""

from __future__ import annotations

import pytest
import torch

from longrnn.errors import UserError
from longrnn.training.repeat import read_repeatedly
from tests.contracts.builders import build_model, random_tokens

# Without a convolution, what the one layer reads is the same in every reading.
MIXERS = {
    "decays per head": {"kind": "mamba2", "d_state": 4, "head_dim": 4, "d_conv": 1},
    "decays per key": {"kind": "mamba", "d_state": 4, "d_conv": 1},
}


@pytest.mark.parametrize("time", [5, 150])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_model_of_one_layer_ends_where_reading_again_ends(mixer: str, time: int) -> None:
    """Repetition gives the state of k readings, for each row and across chunks."""
    model = build_model(MIXERS[mixer], n_layers=1)
    text, tokens = random_tokens(2, 7, seed=1), random_tokens(2, time, seed=2)
    before = model(text).state
    times = torch.tensor([3, 5])
    _, after = read_repeatedly(model, tokens, before, times)
    found = after.layers[0].ssm
    for row, count in enumerate(times.tolist()):
        again = tokens[row : row + 1].repeat(1, count)
        start = model(text[row : row + 1]).state
        expected = model(again, start).state.layers[0].ssm
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["lstm", "gated_deltanet", "mamba3"])
def test_other_cells_are_refused(kind: str) -> None:
    """A cell of which a second reading is not the same map of numbers is refused."""
    model = build_model(kind)
    tokens, start = random_tokens(2, 5), model.init_state(2)
    once, _ = read_repeatedly(model, tokens, start, torch.tensor([1, 1]))
    assert torch.equal(once, model.hidden(tokens, start)[0])
    with pytest.raises(UserError, match="max_repeat"):
        read_repeatedly(model, tokens, start, torch.tensor([1, 2]))
