"""The loss of a batch, and of a run's steps, against a loop over tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.data import TASKS, UNSCORED, Batch
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.state import take
from longrnn.training.config import configured
from longrnn.training.objective import Objective
from tests.training.runs import crash, metrics


def by_token(model: RecurrentLM, batch: Batch) -> Tensor:
    """The loss of a batch, token after token, each document from the zero state."""
    losses = []
    for row in range(len(batch.tokens)):
        state, weighted = model.init_state(1), []
        targets = batch.targets[row]
        scored = targets != UNSCORED
        weights = scored.double() / scored.sum() if batch.weights is None else batch.weights[row]
        body = len(targets) - batch.query_length
        for place, token in enumerate(batch.tokens[row]):
            if batch.is_token is not None and not batch.is_token[row, place]:
                continue
            if place < body and batch.is_document_start[row, place]:
                state = model.init_state(1)
            logits, state = model(token.view(1, 1), state)
            if scored[place]:
                loss = F.cross_entropy(logits[0].double(), targets[place : place + 1])
                weighted.append(loss * weights[place])
        losses.append(torch.stack(weighted).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "text", "data": "texts"},
        {"kind": "instruct", "data": "pairs.jsonl"},
        {"kind": "passkey", "n_keys": 2, "n_queries": 2, "text_weight": 0.3},
        {"kind": "recall", "vocab_size": 16},
    ],
    ids=lambda spec: spec["kind"],
)
def test_the_loss_is_that_of_a_loop(
    spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, documents in a row, padding and queries count as the task says."""
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(
        "\n".join(f'{{"prompt": "{k} and", "completion": "{k * "x"}"}}' for k in range(1, 9))
    )
    Path("texts").mkdir()
    for number, text in enumerate(("one story", "another, longer story", "the end")):
        Path(f"texts/{number}.txt").write_text(text)
    task = TASKS.build(spec, None)
    length = {"text": 30, "passkey": 200, "instruct": 20}.get(spec["kind"], 8)
    batch = task.sample(2, length=length)
    mixer = {"kind": "mamba2", "d_state": 4, "head_dim": 8}
    torch.manual_seed(0)
    config = RecurrentConfig(task.vocab_size, 8, 2, mixer, head_bias=spec["kind"] != "text")
    model = RecurrentLM(config).double()
    loss, expected = Objective(model)([batch], model.init_state(2)).loss, by_token(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
    head = list(model.head.parameters())  # with its bias
    gradients = zip(
        torch.autograd.grad(loss, head), torch.autograd.grad(expected, head), strict=True
    )
    for found, wanted in gradients:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    one = Objective(model)([batch.row(1)], take(model.init_state(2), [1])).loss
    torch.testing.assert_close(one, by_token(model, batch.row(1)), rtol=1e-7, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("passkey_tiny_short", {20: 9.51424, 100: 2.19071, 200: 2.12262}),
        ("passkey_tiny", {20: 0.15635, 100: 0.04538, 200: 0.03588}),
    ],
)
def test_the_embedded_checkpoints_can_be_trained_again(
    name: str, losses: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps have the losses of the code that trained the checkpoints."""
    config = configured(name, [f"output_dir={tmp_path / 'run'}"])
    crash(config, max(losses), monkeypatch)
    found = {row["step"]: row["loss"] for row in metrics(tmp_path / "run")}
    assert losses == pytest.approx({step: found[step] for step in losses}, abs=1e-3)
