"""Sharing common parts of prompts gives the answers of reading each prompt separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrnn import Mitigated, mitigation
from longrnn.cells import MIXERS
from longrnn.data import Passkey
from longrnn.evaluation.passkey import PasskeyRetrieval
from longrnn.evaluation.run import run
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import generate
from longrnn.text import ByteTokenizer
from tests.inference.test_scoring import speaking

GRID: dict[str, Any] = {"lengths": [220, 333, 400], "depths": [0.0, 0.3, 1.0], "n": 3}
# 4 + 3 + 2 cells: the later a key comes, the fewer lengths have room for it.
INSERTED: dict[str, Any] = {"lengths": [220, 333, 400, 420], "insert_at": [0, 70, 200], "n": 3}


@pytest.mark.parametrize(
    "options", [GRID, GRID | {"n_keys": 3}, GRID | {"batch_size": 2}, INSERTED], ids=str
)
@pytest.mark.parametrize("kind", [*sorted(MIXERS), "windowed"])
def test_answers_are_those_of_each_prompt_alone(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """For every cell, number of keys and batch size, and with keys at fixed positions.

    Under a mitigation, rows of one batch may be at different phases of their windows.
    """
    model, computed = speaking("mamba2" if kind == "windowed" else kind, 256), 0
    if kind == "windowed":
        model = Mitigated(model, mitigation("sliding_window(window=70)"))

    def count(_: Any, args: tuple[Any, ...]) -> None:
        nonlocal computed
        computed += args[0].numel()

    tokenizer = ByteTokenizer()
    with model.register_forward_pre_hook(count):
        opened = OpenCheckpoint("model", model, tokenizer)
        (outcome,) = run([opened], [PasskeyRetrieval(**options)], tmp_path, quiet=True)
    task, naive = Passkey(tokenizer, n_keys=options.get("n_keys", 1)), 0
    assert len(outcome.found["model"]) == 27
    for item, row in outcome.found["model"]:
        prompt = task.prompt_of(item.spec.needles, item.spec.asked, length=item.spec.length)
        longest = len(task.answer(item.spec.needle))
        alone = generate(model, prompt[None], max_new_tokens=longest).tokens[0]
        assert row["said"] == tokenizer.decode(alone).strip()
        naive += len(prompt) + len(alone)
    assert computed < 0.8 * naive
