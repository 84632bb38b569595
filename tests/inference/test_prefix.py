"""Sharing common parts of prompts gives the answers of reading each prompt separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from longrnn.evaluation.passkey_grid import Grid

from longrnn import Mitigated, mitigation
from longrnn.cells import MIXERS
from longrnn.data.prompts import RepeatedTokens, length, read, whole
from longrnn.evaluation.passkey import cost, evaluate
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.recurrent import RecurrentConfig
from longrnn.results import Row
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

    mitigation = None

    def __init__(self, model: LanguageModel) -> None:
        self.tokens = 0
        self.asked: list[list[float]] = []
        self.handle = model.register_forward_hook(self.see, with_kwargs=True)

    def see(self, model: Any, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self.tokens += args[0].numel()
        if named["keep"] != 0 and args[0].shape[1] > 1:
            self.asked += output.logits[:, -1].tolist()


def speaking(kind: str) -> RecurrentLM:
    """A model whose random weights are so large that its output depends on all it has read."""
    torch.manual_seed(1)
    model = RecurrentLM(RecurrentConfig(256, 12, 2, mixer_spec(kind))).double()
    return stirred(model, 3)


def answers(model: LanguageModel, output: Path, **options: Any) -> list[Row]:
    subject = OpenCheckpoint("model", model, ByteTokenizer())
    evaluation = PasskeyRetrieval(**_grid(options))
    (outcome,) = run([subject], [evaluation], output, quiet=True)
    return [row for _, row in outcome.found["model"]]


def _grid(options: dict[str, Any]) -> dict[str, Any]:
    given = GRID | options
    return {k: v for k, v in given.items() if k != "depths" or "insert_at" not in given}


def assert_same(model: LanguageModel, folder: Path, prompts: int = 27, **options: Any) -> None:
    """Checks that answers and the logits after every question are equal, in any order.

    The oracles of `test_passkey` check that each row continues from its own key.
    """
    naive = Watched(model)
    expected = answers(model, folder / "naive.jsonl", naive=True, **options)
    naive.handle.remove()
    shared = Watched(model)
    assert answers(model, folder / "shared.jsonl", **options) == expected
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


def test_shared_answers_equal_naive_answers_under_a_mitigation(tmp_path: Path) -> None:
    """Rows of one batch may be at different phases of their windows."""
    model = Mitigated(speaking("mamba2"), mitigation("sliding_window(window=70)"))
    assert_same(model, tmp_path)


@pytest.mark.parametrize("grid", [GRID, GRID | {"n_keys": 3}, INSERTED], ids=["", "keys", "at"])
def test_the_count_of_tokens_is_what_is_read(grid: dict[str, Any], tmp_path: Path) -> None:
    """The count equals the number of tokens that a model reads, shared and naive."""
    subject = OpenCheckpoint("model", speaking("rnn"), ByteTokenizer())
    evaluation = PasskeyRetrieval(**_grid(grid))
    evaluation.prepare([subject])
    expected = evaluation.cost(subject)
    for naive, count in ((True, expected.naive), (False, expected.shared)):
        model = speaking("rnn")
        watched = Watched(model)
        answers(model, tmp_path / f"{naive}.jsonl", naive=naive, **grid)
        assert watched.tokens == count


@pytest.mark.parametrize(
    ("grid", "least"),
    [
        ({"lengths": [512 * 2**i for i in range(8)], "depths": 5}, 2.7),
        ({"lengths": [4096 * i for i in range(1, 17)], "insert_every": 8192}, 10.0),
    ],
    ids=["depths", "insertion points"],
)
def test_sharing_saves_tokens(grid: dict[str, Any], least: float) -> None:
    """For eight lengths that double up to 64k, and for insertion points every 8k."""
    subject, evaluation = (
        OpenCheckpoint("model", speaking("rnn"), ByteTokenizer()),
        PasskeyRetrieval(**grid, n=10),
    )
    evaluation.prepare([subject])
    assert evaluation.cost(subject).ratio >= least


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
