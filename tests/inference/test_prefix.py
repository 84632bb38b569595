"""Sharing common parts of prompts gives the answers of reading each prompt separately."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import Mitigated, mitigation
from longrnn.cells import MIXERS
from longrnn.data import Passkey
from longrnn.data.prompts import read
from longrnn.evaluation.passkey import PasskeyRetrieval, build
from longrnn.evaluation.run import Outcome, run
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import LanguageModel, generate
from longrnn.text import ByteTokenizer
from tests.evaluation.oracles import Oracle
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


def measure(model: Any, output: Path, **options: Any) -> Outcome:
    """The outcome of an evaluation on GRID, of which `options` change some."""
    given = GRID | options
    if "insert_at" in given:
        del given["depths"]
    subject = OpenCheckpoint("model", model, ByteTokenizer())
    return run([subject], [PasskeyRetrieval(**given)], output, quiet=True)[0]


def one_by_one(model: LanguageModel, output: Path, **options: Any) -> list[str]:
    """The answers to the same prompts, each read by itself."""
    tokenizer, said = ByteTokenizer(), []
    found = measure(Oracle(), output, **options).found["model"]
    for prompt in build(
        Passkey(tokenizer, n_keys=options.get("n_keys", 1)), [q.spec for q, _ in found]
    ):
        ids = torch.cat([read(prompt.context), prompt.question])
        answer = 6 - bool(options.get("n_keys"))
        said.append(generate(model, ids[None], max_new_tokens=answer).tokens[0])
    return [tokenizer.decode(ids).strip() for ids in said]


@pytest.mark.parametrize("options", [{}, {"n_keys": 3}, {"batch_size": 2}, INSERTED], ids=str)
@pytest.mark.parametrize("kind", [*sorted(MIXERS), "windowed"])
def test_shared_answers_equal_separate_ones(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """For every cell, number of keys and batch size; the note counts what is read both ways.

    Under a mitigation, rows of one batch may be at different phases of their windows.
    """
    model = speaking("mamba2" if kind == "windowed" else kind, 256)
    if kind == "windowed":
        model = Mitigated(model, mitigation("sliding_window(window=70)"))
    separate = Watched(model)
    expected = one_by_one(model, tmp_path / "separate", **options)
    separate.handle.remove()
    shared = Watched(model)
    outcome = measure(model, tmp_path / "shared", **options)
    assert [row["said"] for _, row in outcome.found["model"]] == expected
    logits = [torch.tensor(sorted(watched.asked)) for watched in (separate, shared)]
    assert logits[0].shape == (27, 256)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-9, atol=1e-9)
    counts = re.findall(r"takes ([\d,]+)", outcome.notes()[0])
    assert [int(one.replace(",", "")) for one in counts] == [shared.tokens, separate.tokens]
    assert shared.tokens < separate.tokens
