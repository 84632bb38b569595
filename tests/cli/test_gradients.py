"""`longrnn diagnose gradients` on tiny models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.diagnostics import gradients
from longrnn.diagnostics.gradients import measure
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.options import validated
from tests.cli.conftest import CLI
from tests.texts import trained_bpe
from tests.training.runs import LSTM, saved, tiny, write_config

SMALL = ["--length", "8"]


def head_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "gradients.jsonl").read_text().splitlines()[0])


def test_models_of_a_configuration(cli: CLI, tmp_path: Path) -> None:
    name = "blocks.0.mixer.cell.weight_ih_l0"
    config = tiny("reverse", tmp_path / "run", fill={name: 0.05})
    write_config(config, tmp_path / "c.yaml")
    orthogonal = "c.yaml model.mixer.init=orthogonal"
    result = cli("diagnose", "gradients", "c.yaml", orthogonal, *SMALL, "--output", "out")
    assert result.code == 0, result.err
    found = head_of(tmp_path / "out")["models"]
    torch.manual_seed(config.seed)
    assert config.model is not None
    expected = RecurrentLM(validated(RecurrentConfig, {"vocab_size": 9, **config.model}, "model"))
    with torch.no_grad():
        expected.get_parameter(name).fill_(0.05)
    assert list(found) == ["c.yaml", orthogonal]
    assert found["c.yaml"] == expected.fingerprint() != found[orthogonal]


def test_a_checkpoint_of_a_run_has_the_task_of_the_run(
    cli: CLI, models: Path, tmp_path: Path
) -> None:
    """The configuration is in its folder, or else in the folder above it."""
    inside = tmp_path / "run/checkpoint"
    inside.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(models / "backwards" / name, inside)
    shutil.copy(models / "backwards/train.yaml", tmp_path / "run")
    result = cli("diagnose", "gradients", "run/checkpoint+float64", *SMALL, "--output", "out")
    assert result.code == 0, result.err
    assert "reverse" in head_of(tmp_path / "out")["task"]
    own = (tmp_path / "run/train.yaml").read_text().replace("kind: reverse", "kind: sort")
    (inside / "train.yaml").write_text(own)
    assert cli("diagnose", "gradients", "run/checkpoint", *SMALL, "--output", "own").code == 0
    assert "sort" in head_of(tmp_path / "own")["task"]


def test_each_model_reads_a_text_with_its_own_tokenizer(
    cli: CLI, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bpe, read = trained_bpe(), []
    bpe.save(saved(Path("bpe"), LSTM | {"vocab_size": 600}))

    def record(model: RecurrentLM, task: Any, length: int, **_: Any) -> Any:
        read.append(task.corpus.header.fingerprint)
        return measure(model, task, length)

    monkeypatch.setattr(gradients, "measure", record)
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    result = cli("diagnose", "gradients", models / "text", "bpe", "--text", "a.txt", *SMALL)
    assert result.code == 0, result.err
    assert read == ["bytes", bpe.fingerprint()]
