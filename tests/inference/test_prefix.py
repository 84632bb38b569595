"""Sharing common parts of prompts gives the answers of reading each prompt separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import Mitigated, mitigation
from longrnn.cells import MIXERS
from longrnn.data.prompts import RepeatedTokens, length, read, whole
from longrnn.evaluation.passkey import cost, evaluate
from longrnn.evaluation.passkey_grid import Grid
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import LanguageModel, LMOutput, RecurrentLM
from longrnn.models.recurrent import RecurrentConfig
from longrnn.results import Row
from longrnn.state import LMState
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
    """Counts the tokens that a language model reads, and keeps the logits after each question."""

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
    """A model whose random weights are so large that its output depends on all it has read."""
    torch.manual_seed(1)
    model = RecurrentLM(RecurrentConfig(256, 12, 2, mixer_spec(kind))).double()
    return stirred(model, 3)


def answers(model: LanguageModel, output: Path, **options: Any) -> list[Row]:
    subject = OpenCheckpoint("model", model, ByteTokenizer())
    given = GRID | options
    grid = Grid(**{name: given.pop(name) for name in Grid._fields if name in given})
    return evaluate([subject], grid, output=output, quiet=True, **given)


def assert_same(model: LanguageModel, folder: Path, prompts: int = 27, **options: Any) -> None:
    """Checks that answers and the logits after every question are equal, in any order.

    The oracles of `test_passkey` check that each row continues from its own key.
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
def test_shared_answers_equal_naive_answers(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """For every cell, number of keys and batch size."""
    assert_same(speaking(kind), tmp_path, **options)


@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_shared_answers_equal_naive_answers_with_insertion_points(
    kind: str, tmp_path: Path
) -> None:
    """Keys at fixed positions, in contexts of several lengths."""
    assert_same(speaking(kind), tmp_path, prompts=27, **INSERTED)


def test_shared_answers_equal_naive_answers_with_a_filler_file(tmp_path: Path) -> None:
    """Prompts with a filler text from a file share a trunk."""
    text = tmp_path / "filler.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(5000)))
    assert_same(speaking("gru"), tmp_path, filler=text)
    folder = tmp_path / "inserted"
    assert_same(speaking("gru"), folder, prompts=27, filler=text, **INSERTED)


def test_shared_answers_equal_naive_answers_under_a_mitigation(tmp_path: Path) -> None:
    """Rows of one batch may be at different phases of their windows."""
    model = Mitigated(speaking("mamba2"), mitigation("sliding_window(window=70)"))
    assert_same(model, tmp_path)


@pytest.mark.parametrize("grid", [GRID, GRID | {"n_keys": 3}, INSERTED], ids=["", "keys", "at"])
def test_the_count_of_tokens_is_what_is_read(grid: dict[str, Any], tmp_path: Path) -> None:
    """The count equals the number of tokens that a model reads, shared and naive."""
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
def test_sharing_saves_tokens(grid: Grid, least: float) -> None:
    """For eight lengths that double up to 64k, and for insertion points every 8k."""
    found = cost([OpenCheckpoint("model", speaking("rnn"), ByteTokenizer())], grid)["model"]
    assert found.ratio >= least


def test_repeated_tokens_are_read_across_their_borders() -> None:
    """Every range gives the tokens of the whole text."""
    parts = [
        whole(torch.tensor([1, 2])),
        RepeatedTokens(torch.tensor([5, 6, 7]), 2, 5),
        whole(torch.tensor([9])),
    ]
    everything = [1, 2, 7, 5, 6, 7, 5, 9]
    assert length(parts) == 8
    for start in range(9):
        for stop in range(start, 9):
            assert read(parts, start, stop).tolist() == everything[start:stop]
