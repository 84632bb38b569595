"""`longrnn diagnose gradients` on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from longrnn.config import build_config
from longrnn.models import RecurrentConfig, RecurrentLM
from tests.cli.conftest import CLI
from tests.training.runs import tiny, write_config

SMALL = ["--length", "8"]


def head_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "gradients.jsonl").read_text().splitlines()[0])


def test_models_of_a_configuration(cli: CLI, tmp_path: Path) -> None:
    """Untrained models have the weights that training starts with, by initialisation."""
    name = "blocks.0.mixer.cell.weight_ih_l0"
    config = tiny("reverse", tmp_path / "run", fill={name: 0.05})
    write_config(config, tmp_path / "c.yaml")
    orthogonal = "c.yaml model.mixer.init=orthogonal"
    result = cli("diagnose", "gradients", "c.yaml", orthogonal, *SMALL, "--output", "out")
    assert result.code == 0, result.err
    found = head_of(tmp_path / "out")["models"]
    torch.manual_seed(config.seed)
    assert config.model is not None
    expected = RecurrentLM(build_config(RecurrentConfig, {"vocab_size": 9, **config.model}))
    with torch.no_grad():
        expected.get_parameter(name).fill_(0.05)
    assert list(found) == ["c.yaml", orthogonal]
    assert found["c.yaml"] == expected.fingerprint() != found[orthogonal]
