"""Mamba-2 equals `transformers`, and its mixer equals the equations in float64."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.cells.mamba2 import Mamba2
from longrnn.models import RecurrentLM
from tests.contracts.builders import assert_near, build_mixer, random_tree, stirred
from tests.mitigations.definitions import Definition, mamba2

pytestmark = pytest.mark.core

VOCAB, D_MODEL, D_STATE, HEAD_DIM, LAYERS, CHUNK = 50, 16, 8, 4, 2, 16


def peers(n_groups: int, tied: bool, **options: Any) -> tuple[RecurrentLM, torch.nn.Module]:
    """Our model and the Hugging Face model with the same non-trivial weights."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        num_hidden_layers=LAYERS,
        state_size=D_STATE,
        head_dim=HEAD_DIM,
        num_heads=2 * D_MODEL // HEAD_DIM,
        expand=2,
        n_groups=n_groups,
        chunk_size=CHUNK,
        tie_word_embeddings=tied,
        **options,
    )
    torch.manual_seed(0)
    theirs: Any = stirred(Mamba2ForCausalLM(config).eval(), seed=1)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load(folder)
    assert isinstance(ours, RecurrentLM)
    return ours, theirs


# `transformers` computes the scan, both norms and the logits in float32 whatever the weights'
# dtype (`hidden_states.float()` in mamba2_chunk_scan), so a float64 comparison would show its
# rounding and not ours. The float64 reference are the equations written out.
@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"d_state": 5, "head_dim": 4},
        {"d_state": 5, "head_dim": 4, "n_groups": 2, "dt_limit": [0.02, 0.2]},
        {"d_state": 3, "head_dim": 8, "n_groups": 2, "bias": True, "conv_bias": False},
        {"d_state": 3, "head_dim": 16, "d_conv": 1, "norm_eps": 1e-2, "backend": "torch"},
    ],
    ids=["plain", "groups-limit", "bias", "no-conv"],
)
@pytest.mark.parametrize("time", [1, 70])
def test_the_mixer_equals_the_equations(options: dict[str, Any], time: int) -> None:
    """In float64, from a non-zero state, to 1e-9."""
    mixer = build_mixer({"kind": "mamba2", **options})
    assert isinstance(mixer, Mamba2)
    x = random_tree(torch.empty(2, time, mixer.d_input, dtype=torch.float64), 1)
    state = random_tree(mixer.init_state(2), 2)
    expected, final = [], state
    for token in x.unbind(1):
        y, final = mamba2(mixer, Definition([], 0, mixer.n_heads), token, final)
        expected.append(y)
    y, after = mixer(x, state)
    assert_near(y, torch.stack(expected, 1), 1e-9, "y")
    assert_near(after.conv, final.conv, 1e-9, "conv")
    assert_near(after.ssm, final.ssm, 1e-9, "ssm")
