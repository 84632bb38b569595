"""Validation: the loss by position on held-out rows, against a loop."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from longrnn.data import TASKS, UNSCORED
from longrnn.training import validation
from tests.training.runs import metrics, tiny, train

EVERY: dict[str, Any] = {"validation": "held_out", "eval_steps": 5, "eval_samples": 3}


def test_the_loss_by_position_is_that_of_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "TOKENS_AT_ONCE", 96)  # rows are read in pieces
    config = tiny("streams", tmp_path / "run", eval_length=256, **EVERY)
    model: Any = train(config).model().eval()
    row = [one for one in metrics(tmp_path / "run") if "eval_loss" in one][-1]
    rows = TASKS.build(cast("dict[str, Any]", config.validation), None).held_out(3, length=256)
    sums: dict[int, list[float]] = {64: [], 128: [], 256: []}
    with torch.no_grad():
        for tokens, targets, starts in zip(
            rows.tokens, rows.targets, rows.is_document_start, strict=True
        ):
            state, position = model.init_state(1), 0
            for token, target, begins in zip(tokens, targets, starts, strict=True):
                if begins:
                    state, position = model.init_state(1), 0
                logits, state = model(token.view(1, 1), state)
                if target != UNSCORED:
                    edge = next(edge for edge in sums if position < edge)
                    sums[edge].append(float(F.cross_entropy(logits[0], target[None])))
                position += 1
    every = [value for values in sums.values() for value in values]
    assert row["eval_loss"] == pytest.approx(sum(every) / len(every), rel=1e-5)
    for edge, values in sums.items():
        if values:
            expected = sum(values) / len(values)
            assert row[f"eval_loss_to_{edge}"] == pytest.approx(expected, rel=1e-5)
    assert {"eval_token_accuracy", "step", "tokens"} <= row.keys()


@pytest.mark.parametrize("kind", ["passkey", "reverse"])
def test_every_task_can_validate(kind: str, tmp_path: Path) -> None:
    task = tiny(kind, tmp_path).task
    length = 8 if kind == "reverse" else 200
    how = {"validation": task, "eval_length": length}
    run = train(tiny(kind, tmp_path / "run", max_steps=4, **how))
    row = next(row for row in run.rows if "eval_loss" in row)
    assert "eval_exact_match" in row
