"""Sharing common parts of prompts gives the answers of reading each prompt separately."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import Mitigated, mitigation
from longrnn.cells import MIXERS
from longrnn.evaluation.passkey import PasskeyRetrieval
from longrnn.evaluation.run import Outcome, run
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import LanguageModel
from longrnn.text import ByteTokenizer
from tests.inference.test_scoring import speaking

GRID: dict[str, Any] = {"lengths": [220, 333, 400], "depths": [0.0, 0.3, 1.0], "n": 3}
# 4 + 3 + 2 cells: the later a key comes, the fewer lengths have room for it.
INSERTED: dict[str, Any] = {
    "lengths": [220, 333, 400, 420],
    "insert_at": [0, 70, 200],
    "n": 3,
}


class Watched:
    """Counts the tokens that a language model reads, and keeps the logits after each question."""

    def __init__(self, model: LanguageModel) -> None:
        self.tokens = 0
        self.asked: list[list[float]] = []
        self.handle = model.register_forward_hook(self.see, with_kwargs=True)

    def see(self, model: Any, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self.tokens += args[0].numel()
        if named["keep"] != 0 and args[0].shape[1] > 1:
            self.asked += output.logits[:, -1].tolist()


def subject(model: LanguageModel) -> OpenCheckpoint:
    return OpenCheckpoint("model", model, ByteTokenizer())


def measure(model: LanguageModel, output: Path, **options: Any) -> Outcome:
    """The outcome of an evaluation on GRID, of which `options` change some."""
    given = GRID | options
    if "insert_at" in given:
        del given["depths"]
    return run([subject(model)], [PasskeyRetrieval(**given)], output, quiet=True)[0]


def answers(model: LanguageModel, output: Path, **options: Any) -> list[tuple[Any, ...]]:
    found = measure(model, output, **options).found["model"]
    return [(*item.key.values(), row["key"], row["said"]) for item, row in found]


def tokens_of(note: str) -> tuple[int, int]:
    """The numbers of tokens, shared and prompt by prompt, in the note about them."""
    shared, naive = re.findall(r"takes ([\d,]+)", note)
    return int(shared.replace(",", "")), int(naive.replace(",", ""))


@pytest.mark.parametrize("options", [{}, {"n_keys": 3}, {"batch_size": 2}, INSERTED], ids=str)
@pytest.mark.parametrize("kind", [*sorted(MIXERS), "windowed"])
def test_shared_answers_equal_naive_answers(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """For every cell, number of keys and batch size, and with keys at fixed positions.

    Under a mitigation, rows of one batch may be at different phases of their windows.
    """
    model = speaking("mamba2" if kind == "windowed" else kind, 256)
    if kind == "windowed":
        model = Mitigated(model, mitigation("sliding_window(window=70)"))
    naive = Watched(model)
    expected = answers(model, tmp_path / "naive", naive=True, **options)
    naive.handle.remove()
    shared = Watched(model)
    assert answers(model, tmp_path / "shared", **options) == expected
    logits = [torch.tensor(sorted(watched.asked)) for watched in (naive, shared)]
    assert logits[0].shape == (27, 256)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-9, atol=1e-9)
    assert shared.tokens < naive.tokens


@pytest.mark.parametrize("grid", [GRID, GRID | {"n_keys": 3}, INSERTED], ids=["", "keys", "at"])
def test_the_count_of_tokens_is_what_is_read(grid: dict[str, Any], tmp_path: Path) -> None:
    """The note gives the number of tokens that a model reads, shared and prompt by prompt."""
    computed: list[int] = []
    notes: list[str] = []
    for naive in (False, True):
        model = speaking("rnn", 256)
        watched = Watched(model)
        notes += measure(model, tmp_path / str(naive), naive=naive, **grid).notes()
        computed.append(watched.tokens)
    assert list(map(tokens_of, notes)) == [tuple(computed)]
