"""Operations per token, utilisation and memory in the log of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.tasks import Batch
from longrnn.training import best_model, throughput
from longrnn.training.throughput import Throughput, flops_per_token, peak_of
from longrnn.training.trainer import Trainer
from tests.training.runs import tiny, train

MAMBA2 = {"kind": "mamba2", "d_state": 8, "head_dim": 4}
WIDTH, VOCAB = 16, 32
# A Mamba-2 layer of width 16: inner width 32, and 32 + 2 · 8 channels of the convolution.
INNER, CHANNELS, HEADS = 32, 48, 8
LAYER = WIDTH * (INNER + CHANNELS + HEADS) + 4 * CHANNELS + INNER * WIDTH
STATE = HEADS * 4 * 8


def model(mixer: dict[str, Any] = MAMBA2, **options: Any) -> RecurrentLM:
    return RecurrentLM(RecurrentConfig(VOCAB, WIDTH, 2, mixer, **options))


def test_operations_of_a_mamba2() -> None:
    """Six per weight of a matrix and token, and six for each of the two products of a state."""
    head = VOCAB * WIDTH
    assert flops_per_token(model()) == 6 * (2 * LAYER + head) + 12 * 2 * STATE
    untied = model(tie_embeddings=False)
    assert flops_per_token(untied) == flops_per_token(model())
    learned = model(position={"kind": "learned", "max_length": 64, "combine": "add"})
    assert flops_per_token(learned) == flops_per_token(model())
    assert flops_per_token(model(), 0.25) == flops_per_token(model()) - 6 * 0.75 * head


def test_operations_of_an_lstm() -> None:
    """Two matrices of four gates in each layer."""
    assert flops_per_token(model({"kind": "lstm"})) == 6 * (2 * 8 * WIDTH**2 + VOCAB * WIDTH)


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    frozen = model()
    for weight in frozen.blocks.parameters():
        weight.requires_grad_(False)
    assert flops_per_token(model()) - flops_per_token(frozen) == 2 * 2 * LAYER


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    """A device is found by whole words of its name; another device has no peak."""
    assert peak_of(name) == peak


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A clock and a GPU that a test sets."""
    at: dict[str, Any] = {"time": 0.0, "name": "NVIDIA H200", "memory": 3 * 2**30}
    monkeypatch.setattr(throughput.time, "monotonic", lambda: at["time"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: at["name"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: at["memory"])
    return at


def batch() -> Batch:
    tokens = torch.zeros(2, 50, dtype=torch.long)
    targets = torch.full_like(tokens, -100)
    targets[:, 25:] = 1
    return Batch(tokens, targets, torch.ones(2, dtype=torch.bool))


def test_a_row_on_a_gpu(fake_gpu: dict[str, Any]) -> None:
    """Tokens are those of both groups; utilisation is that of one device of a group of four."""
    said: list[str] = []
    measured = Throughput(model(), torch.device("cuda"), 2, 4, "bf16", said.append)
    measured.start()
    measured.add(batch())
    fake_gpu["time"] = 0.5
    measured.stop()
    fake_gpu["time"] = 30.0  # an evaluation
    row = measured.row()
    assert row["tokens_per_second"] == 2 * 100 / 0.5
    assert row["mfu"] == pytest.approx(25 * flops_per_token(model(), 0.5) / 0.5 / 989e12)
    assert row["peak_memory_gib"] == 3.0
    assert said == []


@pytest.mark.parametrize(
    ("name", "precision", "reason"),
    [("NVIDIA Unknown", "bf16", "NVIDIA"), ("H200", "no", "bf16")],
)
def test_unknown_utilisation_is_left_out(
    name: str, precision: str, reason: str, fake_gpu: dict[str, Any]
) -> None:
    """The run says so once, and its rows have everything else."""
    fake_gpu["name"] = name
    said: list[str] = []
    measured = Throughput(model(), torch.device("cuda"), 1, 1, precision, said.append)
    for step in range(3):
        measured.start()
        measured.add(batch())
        fake_gpu["time"] = step + 1.0
        measured.stop()
        assert measured.row().keys() == {"tokens_per_second", "peak_memory_gib"}
    assert len(said) == 1
    assert reason in said[0]


def test_a_row_on_a_cpu() -> None:
    """A CPU has no utilisation and no memory of its own, and nothing is said."""
    said: list[str] = []
    measured = Throughput(model(), torch.device("cpu"), 1, 1, "bf16", said.append)
    measured.add(batch())
    measured.stop()
    assert measured.row().keys() == {"tokens_per_second"}
    assert said == []


def test_the_speed_of_a_step_is_without_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the log are often those of steps with an evaluation."""

    def evaluate(trainer: Trainer) -> bool:
        time.sleep(2)
        return False

    monkeypatch.setattr(best_model, "evaluate", evaluate)
    train(tiny("passkey", tmp_path / "run", max_steps=1, logging_steps=1))
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert row["tokens"] / row["tokens_per_second"] < 1.5
