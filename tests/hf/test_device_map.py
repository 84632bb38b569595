"""Baselines that accelerate divides among devices are evaluated as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from longrnn import load
from longrnn.cli.app import app
from longrnn.evaluation import cost
from longrnn.hf.foreign import ForeignLM
from longrnn.models import RecurrentLM
from longrnn.state import expand
from tests.contracts.builders import assert_near
from tests.hf.foreign import causal, tokens, with_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = causal("llama", vocab_size=256, num_hidden_layers=3)
    return with_bytes(model, tmp_path_factory.mktemp("llama") / "model")


def test_a_model_with_layers_on_disk_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Logits, continued forks and the fingerprint are those of the model in memory."""
    from transformers import AutoModelForCausalLM

    here = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict.fromkeys(here, "cpu") | {"model.layers.1": "disk", "model.layers.2": "disk"}
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path
    )
    assert set(theirs.hf_device_map.values()) == {"cpu", "disk"}
    assert any(weight.is_meta for weight in theirs.parameters())
    model, whole, text = ForeignLM(theirs), load(folder), tokens(2, 20)
    assert_near(model(text).logits, whole(text).logits, 1e-6)
    state = expand(model(text[:1, :9]).state, 2)
    rows = text[:1, 9:].expand(2, -1)
    assert_near(model(rows, state).logits, whole(text).logits[:1, 9:].expand(2, -1, -1), 1e-5)
    assert model.fingerprint() == whole.fingerprint()


def test_balanced_divides_models_that_transformers_runs(folder: Path, tmp_path: Path) -> None:
    """Others run on one device, so that both can be compared."""
    text = tokens(1, 7)
    found = load(folder, device="balanced")
    assert isinstance(found, ForeignLM)
    assert torch.equal(found(text).logits, load(folder)(text).logits)
    assert isinstance(load("passkey-tiny", device="balanced"), RecurrentLM)
    job = cost.Job(str(folder), "balanced", 1, 16, 2, 0)
    assert cost.measure(job)["state_bytes"] > 0
    arguments = ["eval", "passkey", "passkey-tiny", "--lengths", "200", "--n", "1", "--quiet"]
    arguments += ["--depths", "1", "--output", str(tmp_path / "out"), "--device", "balanced"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
