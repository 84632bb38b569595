"""Packed rows train like separate rows: losses and gradients, from zero and carried states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.models import RecurrentLM
from longrnn.state import detach, reset
from longrnn.tasks import Instruct, Text
from longrnn.training.objective import Objective
from tests.contracts.builders import build_model
from tests.tasks.corpora import instruct_corpus, text_corpus
from tests.training.runs import MAMBA2, assert_same_run, metrics, tiny, train

# Ids of the small models of the contract tests are below 11.
TEXTS = ["".join(chr((7 * k + j * j) % 11) for j in range(n)) for k, n in enumerate([5, 2, 19, 31])]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
cells = pytest.mark.parametrize("mixer", sorted(MIXERS))
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def gradients(model: RecurrentLM, loss: Tensor) -> dict[str, Tensor]:
    inputs = dict(model.named_parameters())
    return dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))


def assert_equal_training(model: RecurrentLM, found: Tensor, wanted: Tensor, rtol: float) -> None:
    """Equal losses and gradients, relative to the largest entry."""
    assert float((found - wanted).detach().abs()) <= rtol * float(wanted.detach().abs())
    one, other = gradients(model, found), gradients(model, wanted)
    scale = max(float(grad.abs().max()) for grad in other.values())
    for name in one:
        assert float((one[name] - other[name]).abs().max()) <= 10 * rtol * scale, name


def separately(model: RecurrentLM, text: str, scored: slice = slice(None)) -> Tensor:
    """The sum of the losses of a document on a row of its own."""
    ids = torch.tensor([list(text.encode())])
    logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits[0, scored], ids[0, 1:][scored], reduction="sum")


@cells
@dtypes
def test_a_packed_row_trains_like_separate_rows(
    mixer: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A row with all documents has the mean loss, and the gradient, of one row per document."""
    model = build_model(mixer, dtype=dtype)
    task = Text(corpus=text_corpus(tmp_path / "c", TEXTS), packing=True)
    places = sum(len(text) - 1 for text in TEXTS)
    batch = task.segment([0], 0, n_streams=1, length=places, seed=0)
    assert int(batch.is_document_start.sum()) == len(TEXTS)
    loss = Objective(model)([batch], model.init_state(1)).loss
    wanted = torch.stack([separately(model, text) for text in TEXTS]).sum() / places
    assert_equal_training(model, loss, wanted, TOLERANCE[dtype])


@cells
@dtypes
def test_packed_segments_carry_the_state_of_their_document(
    mixer: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Documents that continue over segments have the loss and gradient of whole documents."""
    model = build_model(mixer, dtype=dtype)
    task = Text(corpus=text_corpus(tmp_path / "c", TEXTS), packing=True)
    places, count = sum(len(text) - 1 for text in TEXTS), 53
    assert places == count  # a prime number: segments of one token are the only even division
    segments = [task.segment([0], step, n_streams=1, length=1, seed=0) for step in range(count)]
    loss = Objective(model)(segments, model.init_state(1)).loss
    wanted = torch.stack([separately(model, text) for text in TEXTS]).sum() / places
    assert_equal_training(model, loss, wanted, TOLERANCE[dtype])

    # The carried state of a longer segment is that of one call, detached or not.
    state, total = model.init_state(1), 0.0
    for step in range(4):
        batch = task.segment([0], step, n_streams=1, length=places, seed=0)
        start = reset(state, model.init_state(1), batch.begins)
        output = Objective(model)([batch], start)
        state, total = detach(output.state), total + float(output.loss.detach())
    assert total / 4 == pytest.approx(float(wanted), rel=1e-5)


@cells
def test_answers_train_like_separate_rows(mixer: str, tmp_path: Path) -> None:
    """Rows of whole documents with padding have the gradient of the answers alone."""
    model = build_model(mixer)
    pairs = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in TEXTS]
    task = Instruct(corpus=instruct_corpus(tmp_path / "c", pairs))
    layout = task._rows(1, 40, 0)
    rows = [task.whole_documents([0], k, n_streams=1, length=40, seed=0)
            for k in range(layout.documents)]  # fmt: skip
    assert len(rows) == 2
    losses = [Objective(model)([row], model.init_state(1)).loss for row in rows]
    wanted = torch.stack(
        [separately(model, a + b, slice(len(a) - 1, None)) for a, b in pairs]
    ).sum() / sum(len(answer) for _, answer in pairs)
    # The weights of the loss are float32 numbers.
    assert_equal_training(model, torch.stack(losses).mean(), wanted, 1e-6)


RUNS: dict[str, dict[str, Any]] = {
    "zero": {},
    "carry": {"initial_state": {"kind": "carry"}, "segments_per_step": 2},
    "pass": {"initial_state": {"kind": "pass"}},
}
WORDS = ["lorem ipsum dolor"[: 2 + k % 15] * (1 + k % 7) for k in range(90)]


@pytest.mark.parametrize("kind", ["text", "instruct"])
@pytest.mark.parametrize("start", sorted(RUNS))
def test_packed_runs_resume(kind: str, start: str, tmp_path: Path) -> None:
    """A run on packed rows that was resumed ends bit for bit where an undisturbed one does."""
    if kind == "text":
        task = {"corpus": text_corpus(tmp_path / "c", WORDS), "packing": True}
    else:
        task = {"corpus": instruct_corpus(tmp_path / "c", [(w, w[::-1]) for w in WORDS])}
    changes = {
        "task": {"kind": kind, **task},
        "model": MAMBA2,
        "length": {"max": 250},
        **RUNS[start],
    }
    changes |= {"lr_scheduler_type": "constant", "learning_rate": 1e-2}
    train(tiny("reverse", tmp_path / "whole", **changes))
    train(tiny("reverse", tmp_path / "parts", **changes, max_steps=6))
    train(tiny("reverse", tmp_path / "parts", **changes), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    losses = [row["loss"] for row in metrics(tmp_path / "whole")]
    assert losses[-1] < losses[0]


def test_a_transformer_is_not_trained_on_packed_rows(tmp_path: Path) -> None:
    """A transformer would attend to the other documents of its row."""
    task = {"kind": "text", "corpus": text_corpus(tmp_path / "c", WORDS), "packing": True}
    llama = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 256}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(UserError, match="task.packing"):
        train(tiny("passkey", tmp_path / "run", task=task, transformer=llama, model=None))
