"""Tiny runs, and how tests compare them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longrnn import RecurrentConfig, RecurrentLM
from longrnn import train as train_run
from longrnn.checkpoints.layouts import save_model
from longrnn.config import dump_config
from longrnn.progress import QUIET
from longrnn.training import checkpoint
from longrnn.training.config import TrainConfig
from longrnn.training.run import Run
from longrnn.training.trainer import Trainer
from tests.texts import TEXTS

LSTM = {"vocab_size": 256, "d_model": 16, "n_layers": 1, "mixer": {"kind": "lstm"}}
MAMBA2 = {
    "vocab_size": 256,
    "d_model": 8,
    "n_layers": 2,
    "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
}
BASE: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "warmup_steps": 3,
    "max_steps": 10,
    "logging_steps": 3,
    "save_steps": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "passkey": {"task": {"kind": "passkey"}, "model": MAMBA2, "length": {"max": 180}},
    "carry": {
        "task": {"kind": "passkey", "max_segments": 4, "grow_steps": 3},
        "model": MAMBA2,
        "length": {"max": 180},
        "initial_state": {"kind": "carry"},
        "gradient_accumulation_steps": 2,
    },
    "streams": {
        "task": {"kind": "text", "data": TEXTS},
        "model": MAMBA2,
        "length": {"max": 64},
        "initial_state": {"kind": "carry", "zero_share": 0.2},
        "segments_per_step": 2,
        "gradient_accumulation_steps": 2,
    },
    "pass": {
        "task": {"kind": "text", "data": TEXTS},
        "model": LSTM,
        "length": {"max": 64},
        "initial_state": {"kind": "pass"},
    },
    "fitted_noise": {
        "task": {"kind": "text", "data": TEXTS},
        "model": MAMBA2,
        "length": {"max": 64},
        "initial_state": {"kind": "fitted_noise"},
        "validation": "held_out",
        "eval_steps": 3,
        "eval_samples": 3,
        "eval_length": 96,
    },
    "reverse": {
        "task": {"kind": "reverse", "vocab_size": 8, "held_out": 16},
        "model": {
            "d_model": 16,
            "n_layers": 1,
            "block": "plain",
            "tie_embeddings": False,
            "mixer": {"kind": "gru"},
            "position": {"kind": "sinusoidal"},
        },
        "length": {"max": 8},
        "per_device_train_batch_size": 8,
    },
}
MEASURED = ("tokens_per_second", "peak_memory_gib")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", QUIET: "1"}


def tiny(kind: str, output_dir: Path, **changes: Any) -> TrainConfig:
    """The configuration of a tiny run."""
    values = {**BASE, **KINDS[kind], "output_dir": str(output_dir), **changes}
    if "model" not in changes and "init_from" in changes:
        del values["model"]
    if "warmup_steps" not in changes:
        values["warmup_steps"] = min(values["warmup_steps"], values["max_steps"])
    return TrainConfig(**values)


def write_config(config: TrainConfig, path: Path) -> Path:
    path.write_text(dump_config(config))
    return path


def saved(folder: Path, config: Mapping[str, Any] = MAMBA2, *, tokenizer: str = "bytes") -> Path:
    """A checkpoint with random weights."""
    torch.manual_seed(0)
    save_model(RecurrentLM(RecurrentConfig(**config)), folder, tokenizer=tokenizer)
    return folder


def train(config: TrainConfig, *, resume: bool = False) -> Run:
    return train_run(config, resume=config.output_dir if resume else None)


def metrics(output_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, without what depends on the clock and the device."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def last_checkpoint(output_dir: Path) -> Path:
    return checkpoint.checkpoints(output_dir)[-1]


def assert_same_run(one: Path, other: Path) -> None:
    """Equal bit for bit: final model, optimizer, counters, carried states and metrics."""
    weights = [
        {path.name: load_file(path) for path in folder.glob("*.safetensors")}  # also of an adapter
        for folder in (one, other)
    ]
    assert weights[0]
    assert_equal(weights[0], weights[1])
    a, b = last_checkpoint(one), last_checkpoint(other)
    assert a.name == b.name
    assert sorted(path.name for path in a.iterdir()) == sorted(path.name for path in b.iterdir())
    for name in ("training.pt", "carry-0.pt"):
        assert_equal(checkpoint.read_tensors(a / name), checkpoint.read_tensors(b / name))
    assert metrics(one) == metrics(other)


def assert_equal(one: Any, other: Any) -> None:
    """Nested values with tensors, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


class Crash(Exception):
    """What a test raises in the middle of a run."""


def crash(
    config: TrainConfig, step: int, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False
) -> None:
    """Trains until `step` steps are done, and then raises."""
    whole = Trainer.train_step

    def until(self: Trainer, *, stop: bool = False) -> dict[str, float]:
        if self.step == step:
            raise Crash
        return whole(self, stop=stop)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", until)
        with pytest.raises(Crash):
            train(config, resume=resume)


def sick(folder: Path, fault: str, kind: str = "reverse", token: int = 3) -> str:
    """A checkpoint whose model produces values that are not finite for one token.

    Args:
        folder: to write.
        fault: `forwards`, in the output; `backwards`, in the gradient alone; `norm`, in its norm.
        kind: of the run, see `KINDS`.
        token: the token.
    """
    torch.manual_seed(0)
    changes: dict[str, Any] = {"tie_embeddings": False}
    changes |= {"vocab_size": 9} if kind == "reverse" else {}
    # Without norms, which would make the large numbers small again.
    changes |= {"mixer": MAMBA2["mixer"], "block": "plain"} if fault == "forwards" else {}
    model = RecurrentLM(RecurrentConfig(**KINDS[kind]["model"] | changes))
    with torch.no_grad():
        if fault == "forwards":
            # The recurrence multiplies three numbers of this order.
            model.embedding.weight[token] = 1e20
        else:
            # The product is of order 1; the gradient of the small factor is the large one.
            weight = model.cells[0].get_parameter("cell.weight_ih_l0")
            weight[:, :16] *= 1e37
            model.embedding.weight.mul_(1e-37)
            if fault == "backwards":
                model.head.weight.mul_(1e5)
    save_model(model, folder)
    return str(folder)
