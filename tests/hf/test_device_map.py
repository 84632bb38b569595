"""Baselines that accelerate divides among devices are evaluated as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from longrnn import load
from longrnn.cli.app import app
from longrnn.errors import UserError
from longrnn.evaluation import cost
from longrnn.hf.adapter import HFLanguageModel
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
    model, whole, text = HFLanguageModel(theirs), load(folder), tokens(2, 20)
    assert_near(model(text).logits, whole(text).logits, 1e-6)
    state = expand(model(text[:1, :9]).state, 2)
    rows = text[:1, 9:].expand(2, -1)
    assert_near(model(rows, state).logits, whole(text).logits[:1, 9:].expand(2, -1, -1), 1e-5)
    assert model.fingerprint() == whole.fingerprint()


def test_layers_are_divided_without_cutting_one(folder: Path) -> None:
    """accelerate's plan for two small devices respects `_no_split_modules`."""
    from accelerate import infer_auto_device_map, init_empty_weights
    from accelerate.utils.modeling import compute_module_sizes
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        empty: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    room = int(0.8 * compute_module_sizes(empty)[""])
    plan = infer_auto_device_map(
        empty,
        max_memory={"cpu": room, "disk": 10**9},
        no_split_module_classes=sorted(empty._no_split_modules),
    )
    layers = {name: place for name, place in plan.items() if ".layers." in name}
    assert {name.count(".") for name in layers} == {2}, "a layer is on one device"
    assert len(set(plan.values())) == 2


def test_balanced_divides_models_that_transformers_runs(folder: Path, tmp_path: Path) -> None:
    """Others run on one device, so that both can be compared."""
    text = tokens(1, 7)
    found = load(folder, device="balanced")
    assert isinstance(found, HFLanguageModel)
    assert torch.equal(found(text).logits, load(folder)(text).logits)
    assert isinstance(load("passkey-tiny", device="balanced"), RecurrentLM)
    job = cost.Job(str(folder), "balanced", 1, 16, 2, 0)
    assert cost.measure(job)["state_bytes"] > 0
    arguments = ["eval", "passkey", "passkey-tiny", "--lengths", "200", "--n", "1", "--quiet"]
    arguments += ["--depths", "1", "--output", str(tmp_path / "out"), "--device", "balanced"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    trained = CliRunner().invoke(app, ["replay", "missing", "--device", "balanced"])
    assert isinstance(trained.exception, UserError)
