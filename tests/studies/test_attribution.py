"""The gradient at the embedding rows of rare and frequent tokens equals that of autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.data import TASKS, Batch, Reverse, SequenceTask
from longrnn.errors import UserError
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.studies import attribution as module
from longrnn.studies.attribution import along_checkpoints, attribution, classes_of, rows
from tests.contracts.builders import MIXER_OPTIONS
from tests.texts import TEXTS
from tests.training.runs import tiny, train

DUAL = {"kind": "reverse_dual_frequency", "vocab_size": 6, "held_out": 4}


def dual() -> SequenceTask:
    task = TASKS.build(DUAL, None)
    assert isinstance(task, SequenceTask)
    return task


def draw(task: SequenceTask, n: int, length: int = 4) -> Batch:
    return task.sample(n, length=length, generator=torch.Generator().manual_seed(0))


def build(kind: str, **changes: Any) -> RecurrentLM:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 7,
        "d_model": 8,
        "n_layers": 2,
        "tie_embeddings": False,
        "mixer": {"kind": kind, **MIXER_OPTIONS.get(kind, {})},
    }
    return RecurrentLM(RecurrentConfig(**options | changes)).double()


def row_gradient(model: RecurrentLM, batch: Batch, row: int) -> Tensor:
    """Return the gradient of one sequence's loss at the embedding, `(v, d)`, by autograd."""
    logits = model(batch.tokens[row : row + 1]).logits[0]
    loss = F.cross_entropy(logits, batch.targets[row])  # the mean over scored tokens
    return torch.autograd.grad(loss, model.embedding.weight)[0]


@pytest.mark.parametrize("position", ["none", "duplicate"])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm", "mamba2"])
def test_it_equals_the_gradient_of_the_embedding(
    kind: str, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every sequence, both sums are those of autograd (the weights of a loss are float32)."""
    monkeypatch.setattr(module, "ROWS", 5)  # two parts
    task, model = dual(), build(kind, position={"kind": position})
    batch = draw(task, 9)
    found = attribution(model, batch, classes_of(task, batch.tokens))
    for row, tokens in enumerate(batch.tokens):
        squares = row_gradient(model, batch, row).square().sum(1)
        for kind_of_token, ids in enumerate((slice(3, 6), slice(0, 3))):
            expected = float(squares[ids].sum())
            assert float(found.squares[kind_of_token, row]) == pytest.approx(expected, rel=1e-6)
            distinct = {int(token) for token in tokens} & set(range(6)[ids])
            assert int(found.tokens[kind_of_token, row]) == len(distinct)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tied_head_adds_nothing() -> None:
    """Only what a token does as an input is counted, whether the head is tied or not."""
    tied, untied = build("gru", tie_embeddings=True), build("gru")
    untied.load_state_dict(tied.state_dict())
    task = dual()
    batch = draw(task, 6)
    classes = classes_of(task, batch.tokens)
    one, other = (attribution(model, batch, classes).squares for model in (tied, untied))
    assert torch.allclose(one, other, rtol=1e-12)


def test_long_inputs_are_counted_in_full() -> None:
    """A model that reads its input in several segments has the same gradient."""
    task = TASKS.build({**DUAL, "vocab_size": 100}, None)
    assert isinstance(task, SequenceTask)
    model = build("lstm", vocab_size=101)
    batch = draw(task, 8, length=70)  # 140 tokens, in segments of 64
    found = attribution(model, batch, classes_of(task, batch.tokens))
    squares = row_gradient(model, batch, 3).square().sum(1)
    assert float(found.squares[0, 3]) == pytest.approx(float(squares[50:100].sum()), rel=1e-6)
    assert float(found.squares[1, 3]) == pytest.approx(float(squares[:50].sum()), rel=1e-6)


def test_classes() -> None:
    """Classes are those of the task; in a text, the least frequent eighth of its tokens is rare."""
    rare, frequent = classes_of(dual(), torch.zeros(0, dtype=torch.long))
    assert (rare.nonzero()[:, 0].tolist(), frequent.nonzero()[:, 0].tolist()) == (
        [3, 4, 5],
        [0, 1, 2],
    )
    text = TASKS.build({"kind": "text", "files": TEXTS}, None)
    drawn = torch.tensor([[7] * 20 + [8] * 8 + [9] * 2 + [10] * 2])
    rare, frequent = classes_of(text, drawn)
    assert rare.nonzero()[:, 0].tolist() == [9, 10]  # 4 of 32 tokens
    assert frequent.nonzero()[:, 0].tolist() == [7, 8]
    with pytest.raises(UserError):
        classes_of(Reverse(vocab_size=7, held_out=4), drawn)


def test_along_checkpoints(tmp_path: Path) -> None:
    """All checkpoints are measured on the same sequences; the share is that of both sums."""
    trainer = train(tiny("reverse", tmp_path / "run", task=DUAL, save_total_limit=9))
    task = trainer.task
    measured = along_checkpoints(tmp_path / "run", task, length=4, n=40, quiet=True)
    assert [one.step for one in measured] == [4, 8, 10]
    batch = task.sample(40, length=4, generator=torch.Generator().manual_seed(0))
    model = trainer.model
    assert isinstance(model, RecurrentLM)
    rare, frequent = attribution(model, batch, classes_of(task, batch.tokens)).squares
    last = measured[-1]
    assert last.rare.mean == pytest.approx(float(rare.mean()), rel=1e-5)
    assert last.frequent.mean == pytest.approx(float(frequent.mean()), rel=1e-5)
    assert last.rare_share.mean == pytest.approx(float((rare / (rare + frequent)).mean()), rel=1e-5)
    assert last.rare_share.n == 40
    assert last.per_rare_token.n < 40  # some sequences have no rare token
    assert [len(cells) for cells in rows(measured)] == [6, 6, 6]
    with pytest.raises(UserError, match="checkpoints"):
        along_checkpoints(tmp_path, task, length=4)
    with pytest.raises(UserError, match="n must be from 2"):
        along_checkpoints(tmp_path / "run", task, length=4, n=1)
    only_frequent = TASKS.build({**DUAL, "rare_share": 1e-9}, None)
    with pytest.raises(UserError):
        along_checkpoints(tmp_path / "run", only_frequent, length=4, n=4, quiet=True)


def test_a_text_is_measured(tmp_path: Path) -> None:
    """A run on a text has rare tokens as well."""
    trainer = train(tiny("pass", tmp_path / "run"))
    (*_, last) = along_checkpoints(tmp_path / "run", trainer.task, length=64, n=12, quiet=True)
    assert 0 < last.rare_share.mean < 1
