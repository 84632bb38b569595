"""Prompts that share what they have in common, against reading each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import Mitigated, mitigation
from longrnn.evaluation.passkey import Subject, evaluate
from longrnn.evaluation.results import Row
from longrnn.mixers import MIXERS
from longrnn.models import LanguageModel, LMOutput, RecurrentLM
from longrnn.models.recurrent import RecurrentConfig
from longrnn.state import LMState
from longrnn.tasks.spans import Span, length, read, whole
from longrnn.text import ByteTokenizer
from tests.contracts.builders import mixer_spec, stirred

GRID: dict[str, Any] = {"lengths": [220, 333, 400], "depths": [0.0, 0.3, 1.0], "n": 3}


class Watched:
    """A language model that counts the tokens it reads, and keeps what follows each question."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.tokens, self.vocab_size = model, 0, model.vocab_size
        self.asked: list[list[float]] = []

    def fingerprint(self) -> str:
        return self.model.fingerprint()

    def init_state(self, batch_size: int) -> LMState:
        return self.model.init_state(batch_size)

    def __call__(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        self.tokens += tokens.numel()
        output = self.model(tokens, state, keep=keep)
        if keep != 0 and tokens.shape[1] > 1:
            self.asked += output.logits[:, -1].tolist()
        return output


def speaking(kind: str) -> RecurrentLM:
    """A model with random weights, large enough that what it says depends on all it has read."""
    torch.manual_seed(1)
    model = RecurrentLM(RecurrentConfig(256, 12, 2, mixer_spec(kind))).double()
    return stirred(model, 3)


def answers(model: LanguageModel, output: Path, **options: Any) -> list[Row]:
    subject = Subject("model", model, ByteTokenizer())
    return evaluate([subject], output=output, quiet=True, **(GRID | options))


def assert_same(model: LanguageModel, folder: Path, **options: Any) -> None:
    """Same answers, and the same logits behind every question, in some order.

    That a row goes on from its own key and from no other is what the oracles of `test_passkey` say.
    """
    naive, shared = Watched(model), Watched(model)
    expected = answers(naive, folder / "naive.jsonl", naive=True, **options)
    assert answers(shared, folder / "shared.jsonl", **options) == expected
    logits = [torch.tensor(sorted(watched.asked)) for watched in (naive, shared)]
    assert logits[0].shape == (27, 256)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-9, atol=1e-9)
    assert shared.tokens < naive.tokens


@pytest.mark.parametrize("options", [{}, {"n_keys": 3}, {"batch_size": 2}], ids=str)
@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_shared_says_what_naive_says(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A fork at a wrong token, a row that goes on from another's state, a question in a state."""
    assert_same(speaking(kind), tmp_path, **options)


def test_of_a_file(tmp_path: Path) -> None:
    """Prompts that begin at different places of a filler and share one trunk."""
    text = tmp_path / "filler.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(5000)))
    assert_same(speaking("gru"), tmp_path, filler=text)


def test_under_a_mitigation(tmp_path: Path) -> None:
    """A carry whose rows are at different places of their windows."""
    model = Mitigated(speaking("mamba2"), mitigation("sliding_window(window=70)"))
    assert_same(model, tmp_path)


def test_fewer_tokens_are_read(tmp_path: Path) -> None:
    """Eight doubling lengths, five depths, ten keys: what sharing is for."""
    grid = {
        "lengths": [256 * 2**i for i in range(6)],
        "depths": [0.0, 0.25, 0.5, 0.75, 1.0],
        "n": 10,
    }
    counts = []
    for naive in (True, False):
        watched = Watched(speaking("rnn"))
        answers(watched, tmp_path / f"{naive}.jsonl", naive=naive, batch_size=64, **grid)
        counts.append(watched.tokens)
    assert counts[0] > 2 * counts[1]


def test_spans_are_read_across_their_borders() -> None:
    """Tokens of a neighbour, or a filler that does not begin anew."""
    spans = [
        whole(torch.tensor([1, 2])),
        Span(torch.tensor([5, 6, 7]), 2, 5),
        whole(torch.tensor([9])),
    ]
    everything = [1, 2, 7, 5, 6, 7, 5, 9]
    assert length(spans) == 8
    for start in range(9):
        for stop in range(start, 9):
            assert read(spans, start, stop).tolist() == everything[start:stop]
