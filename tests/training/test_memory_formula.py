"""The formula for the memory of a training step against measured peaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.live_bytes import LiveBytes
from longrnn.cli.app import app
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.recompute import GRANULARITIES
from longrnn.tasks import Batch
from longrnn.training.config import TrainConfig
from longrnn.training.memory import memory_of, training_memory
from longrnn.training.objective import Objective
from longrnn.training.optim import build_optimizer
from tests.training.runs import tiny, write_config

MODEL = RecurrentConfig(512, 128, 3, {"kind": "mamba2", "d_state": 32, "head_dim": 32})


def measure(config: RecurrentConfig, rows: int, tokens: int, **how: str) -> tuple[int, int]:
    """Bytes kept after the forward pass, and the peak of a step with weights and optimizer."""
    torch.manual_seed(0)
    model = RecurrentLM(config)
    model.gradient_checkpointing_enable(how["gradient_checkpointing"])
    optimizer = build_optimizer(model, TrainConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    moments = [v for entry in optimizer.state.values() for v in entry.values()]
    ids = torch.randint(config.vocab_size, (rows, tokens + 1))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, dtype=torch.bool))
    objective, live = Objective(model), LiveBytes()
    persistent: list[Tensor] = [*model.parameters(), *moments]
    live.known(*persistent)
    narrow = how["mixed_precision"] == "bf16"
    with live:
        state = model.init_state(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            output = objective([batch], state)
        kept = live.now
        output.loss.backward()
    return kept, live.peak + sum(one.numel() * one.element_size() for one in persistent)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("gradient_checkpointing", GRANULARITIES)
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1024), (4, 300)])
def test_the_formula_equals_measured_peaks(
    rows: int, tokens: int, mixed_precision: str, gradient_checkpointing: str, backend: str
) -> None:
    """What is kept to 5 %, and the peak to a quarter, on the safe side."""
    how: dict[str, Any] = {
        "mixed_precision": mixed_precision,
        "gradient_checkpointing": gradient_checkpointing,
    }
    model = replace(MODEL, mixer={**MODEL.mixer, "backend": backend})
    kept, peak = measure(model, rows, tokens, **how)
    computed = training_memory(model, rows=rows, tokens=tokens, **how)
    parameters = computed.gradients
    # Kept beside the activations: the gradient of the head, and the copies of autocast.
    head = 4 * MODEL.vocab_size * MODEL.d_model
    casts = computed.weights - parameters
    if gradient_checkpointing != "no":
        casts = 0
    assert kept == pytest.approx(computed.activations + head + casts, rel=0.05)
    assert 0.97 * peak < computed.total < 1.25 * peak


def test_aims_at_twelve_layers() -> None:
    """At 12 × 512: at most 0.12 MiB per token with blocks, and 0.6 times as much in bfloat16."""
    config = RecurrentConfig(8192, 512, 12, {"kind": "mamba2", "d_state": 128, "head_dim": 64})

    def per_token(**how: Any) -> float:
        sizes = [training_memory(config, rows=1, tokens=t, **how).activations for t in (8192, 4096)]
        return (sizes[0] - sizes[1]) / 4096 / 2**20

    assert per_token(gradient_checkpointing="block") < 0.12
    assert per_token() < 0.4
    assert per_token(mixed_precision="bf16") < 0.6 * per_token()


@pytest.mark.parametrize("change", [{"mixer": {"kind": "lstm"}}, {"block": "plain"}])
def test_other_models_are_refused(change: dict[str, Any]) -> None:
    """The formula is that of Mamba-2 in residual blocks."""
    with pytest.raises(UserError):
        training_memory(RecurrentConfig(**change), rows=1, tokens=8)


def test_a_dry_run_accepts_models_without_a_formula(tmp_path: Path) -> None:
    """A valid GRU passes `--dry-run`, which says that its memory is not computed."""
    path = write_config(tiny("reverse", tmp_path / "run"), tmp_path / "config.yaml")
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "gru" in done.output
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_the_memory_and_writes_nothing(tmp_path: Path) -> None:
    """`longrnn train CONFIG --dry-run`."""
    path = write_config(tiny("carry", tmp_path / "run"), tmp_path / "config.yaml")
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "activations" in done.output
    assert "together" in done.output
    assert not (tmp_path / "run").exists()


CARRY = ["initial_state={kind: carry}", "length={max: 64, grow_steps: 0}"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["mitigation=sliding_windw(window=3)"], "did you mean 'sliding_window'"),
        (["model.vocab_size=5"], "the model has 5: set model.vocab_size=25"),
        (["task.files=[missing.txt]"], "no text file missing.txt"),
        (
            ["num_processes=4", "context_parallel_size=3"],
            "does not divide the 4 processes of the run",
        ),
        (["num_processes=4", "shard_size=3"], "shard_size=3 does not divide the 4 processes"),
        (["num_processes=64", *CARRY], "and there are 128 streams"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    changes: list[str], message: str, tmp_path: Path
) -> None:
    """Before hours in the queue of a cluster, and without its GPUs."""
    path = write_config(tiny("fitted_noise", tmp_path / "run"), tmp_path / "config.yaml")
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run", *changes])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)


def test_shards_divide_weights_gradients_and_moments(tmp_path: Path) -> None:
    """`shard_size` of a configuration is that of its memory."""
    whole = memory_of(tiny("carry", tmp_path))
    shared = memory_of(tiny("carry", tmp_path, shard_size=2))
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(shared, name) == getattr(whole, name) // 2
    assert shared.activations == whole.activations
