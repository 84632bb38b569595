"""Hybrids train with carried states, and their results are checkpoints of their own architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longrnn import load
from longrnn.errors import UserError
from longrnn.hf.hybrid.model import HybridLM
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.models import build
from longrnn.training.objective import Objective
from longrnn.training.trainer import Trainer
from tests.contracts.builders import assert_near
from tests.hf.architectures import architecture
from tests.hf.foreign import with_bytes
from tests.texts import TEXTS
from tests.training.runs import assert_same_run, crash, metrics, tiny, train

LENGTH = 32
COMMON: dict[str, Any] = {
    "task": {"kind": "text", "data": TEXTS},
    "length": {"max": LENGTH},
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
}


def hybrid(folder: Path, kind: str = "falcon_h1", **options: Any) -> Path:
    return with_bytes(architecture(kind, vocab_size=256, **options), folder / kind)


def config(base: Path, output: Path, **changes: Any) -> TrainConfig:
    return tiny("streams", output, init_from=str(base), **COMMON | changes)


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid", "qwen3_next", "kimi_linear"])
def test_the_first_loss_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    base = hybrid(tmp_path, kind)
    settings = config(base, tmp_path / "run", gradient_accumulation_steps=1, segments_per_step=1)
    run = train(settings)
    trainer_rows = Trainer.rows if hasattr(Trainer, "rows") else None
    assert trainer_rows is None
    model = AutoModelForCausalLM.from_pretrained(base)
    from longrnn.data import TASKS
    from longrnn.text import ByteTokenizer
    from longrnn.training.batches import segments

    (batch,) = segments(TASKS.build(settings.task, ByteTokenizer()), settings, 0, 0)
    labels = batch.targets
    with torch.no_grad():
        loss = model(input_ids=batch.tokens, shift_labels=labels, labels=labels).loss
    assert run.rows[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
