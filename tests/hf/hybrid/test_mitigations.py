"""Mitigations, calibration and diagnosis on the recurrent layers of a hybrid."""

from functools import cache

import pytest
import torch

from longrnn.errors import UserError
from longrnn.hf.hybrid.model import HybridLM
from longrnn.mitigations import MITIGATIONS, mitigation
from tests.contracts.builders import mitigation_spec
from tests.hf.foreign import assert_continues, causal, hybrid, tokens

LIMIT = 0.01


@cache
def double(kind: str) -> HybridLM:
    return hybrid(causal(kind, torch.float64))


@pytest.mark.parametrize("name", sorted(MITIGATIONS.keys()))
@pytest.mark.parametrize("kind", ["falcon_h1", "jamba", "kimi_linear", "olmo_hybrid", "zamba"])
def test_mitigated_pieces_and_forks_equal_one_call(kind: str, name: str) -> None:
    model, chosen = double(kind), mitigation(mitigation_spec(name))
    if name == "sliding_window" and not model.cells[0].diagonal:
        with pytest.raises(UserError, match="matrices"):
            model.under(chosen)
        return
    mitigated = model.under(chosen)
    text = tokens(2, 30, seed=4) % 60
    # The router of experts of a Kimi-Linear computes in float32.
    tolerance = 1e-6 if kind == "kimi_linear" else 1e-9
    assert_continues(mitigated, text, mitigated(text).logits, tolerance)


def test_layers_count_the_mamba_2_layers() -> None:
    """Layer 1 of a Bamba with attention in the middle is its third layer."""
    model, text = double("bamba"), tokens(1, 20)
    assert model.layer_numbers == [0, 2]
    state = model(text).state
    limited = model.under(mitigation(f"state_norm(threshold={LIMIT}, layers=[1])"))
    changed = limited(text).state
    first, second = (
        torch.allclose(state.layers[number].cell.ssm, changed.layers[number].cell.ssm, atol=1e-6)
        for number in model.layer_numbers
    )
    assert (first, second) == (True, False)
    keys = [one.layers[1].keys[0] for one in (state, changed)]
    torch.testing.assert_close(*keys)
    with pytest.raises(UserError, match="layer 2"):
        model.under(mitigation(f"state_norm(threshold={LIMIT}, layers=[2])"))
