"""Prompts that share what they have in common, against reading each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import Mitigated, mitigation
from longrnn.evaluation.passkey import cost, evaluate
from longrnn.evaluation.passkey_grid import Grid
from longrnn.hf.opened import OpenCheckpoint
from longrnn.mixers import MIXERS
from longrnn.models import LanguageModel, LMOutput, RecurrentLM
from longrnn.models.recurrent import RecurrentConfig
from longrnn.results import Row
from longrnn.state import LMState
from longrnn.tasks.repeated import RepeatedTokens, length, read, whole
from longrnn.text import ByteTokenizer
from tests.contracts.builders import mixer_spec, stirred

GRID: dict[str, Any] = {"lengths": [220, 333, 400], "depths": [0.0, 0.3, 1.0], "n": 3}
# 4 + 3 + 2 cells: the later a key comes, the fewer lengths have room for it.
INSERTED: dict[str, Any] = {
    "lengths": [220, 333, 400, 420],
    "depths": (),
    "insert_at": [0, 70, 200],
    "n": 3,
}


class Watched:
    """A language model that counts the tokens it reads, and keeps what follows each question."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.tokens, self.vocab_size = model, 0, model.vocab_size
        self.max_length = model.max_length
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
    subject = OpenCheckpoint("model", model, ByteTokenizer())
    asked = GRID | options
    grid = Grid(**{name: asked.pop(name) for name in Grid._fields if name in asked})
    return evaluate([subject], grid, output=output, quiet=True, **asked)


def assert_same(model: LanguageModel, folder: Path, prompts: int = 27, **options: Any) -> None:
    """Same answers, and the same logits behind every question, in some order.

    That a row goes on from its own key and from no other is what the oracles of `test_passkey` say.
    """
    naive, shared = Watched(model), Watched(model)
    expected = answers(naive, folder / "naive.jsonl", naive=True, **options)
    assert answers(shared, folder / "shared.jsonl", **options) == expected
    logits = [torch.tensor(sorted(watched.asked)) for watched in (naive, shared)]
    assert logits[0].shape == (prompts, 256)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-9, atol=1e-9)
    assert shared.tokens < naive.tokens


@pytest.mark.parametrize("options", [{}, {"n_keys": 3}, {"batch_size": 2}], ids=str)
@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_shared_says_what_naive_says(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A fork at a wrong token, a row that goes on from another's state, a question in a state."""
    assert_same(speaking(kind), tmp_path, **options)


@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_inserted_says_what_naive_says(kind: str, tmp_path: Path) -> None:
    """A key that slides with the length, a branch that goes on behind another insertion point."""
    assert_same(speaking(kind), tmp_path, prompts=27, **INSERTED)


def test_of_a_file(tmp_path: Path) -> None:
    """Prompts that begin at different places of a filler and share one trunk."""
    text = tmp_path / "filler.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(5000)))
    assert_same(speaking("gru"), tmp_path, filler=text)
    folder = tmp_path / "inserted"
    assert_same(speaking("gru"), folder, prompts=27, filler=text, **INSERTED)


def test_under_a_mitigation(tmp_path: Path) -> None:
    """A carry whose rows are at different places of their windows."""
    model = Mitigated(speaking("mamba2"), mitigation("sliding_window(window=70)"))
    assert_same(model, tmp_path)


@pytest.mark.parametrize("grid", [GRID, GRID | {"n_keys": 3}, INSERTED], ids=["", "keys", "at"])
def test_the_count_of_tokens_is_what_is_read(grid: dict[str, Any], tmp_path: Path) -> None:
    """A count that flatters: it is compared with what a model was given, both ways."""
    subject = OpenCheckpoint("model", speaking("rnn"), ByteTokenizer())
    expected = cost([subject], Grid(**grid))["model"]
    for naive, count in ((True, expected.naive), (False, expected.shared)):
        watched = Watched(speaking("rnn"))
        answers(watched, tmp_path / f"{naive}.jsonl", naive=naive, **grid)
        assert watched.tokens == count


@pytest.mark.parametrize(
    ("grid", "least"),
    [
        (Grid([512 * 2**i for i in range(8)], 10, depths=[0.0, 0.25, 0.5, 0.75, 1.0]), 2.7),
        (Grid([4096 * i for i in range(1, 17)], 10, insert_at=range(0, 65536, 8192)), 10.0),
    ],
    ids=["depths", "insertion points"],
)
def test_how_many_fewer_tokens(grid: Grid, least: float) -> None:
    """What sharing is for: eight lengths that double up to 64k, or every 8k at even lengths."""
    found = cost([OpenCheckpoint("model", speaking("rnn"), ByteTokenizer())], grid)["model"]
    assert found.ratio >= least


def test_spans_are_read_across_their_borders() -> None:
    """Tokens of a neighbour, or a filler that does not begin anew."""
    spans = [
        whole(torch.tensor([1, 2])),
        RepeatedTokens(torch.tensor([5, 6, 7]), 2, 5),
        whole(torch.tensor([9])),
    ]
    everything = [1, 2, 7, 5, 6, 7, 5, 9]
    assert length(spans) == 8
    for start in range(9):
        for stop in range(start, 9):
            assert read(spans, start, stop).tolist() == everything[start:stop]
