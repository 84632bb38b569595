"""Effective remembrance equals its definition, one context after another."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.evaluation.memory import remembrance
from longrnn.evaluation.options import MemoryOptions
from longrnn.evaluation.texts import read_documents
from longrnn.inference import trie
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.text import ByteTokenizer
from tests.contracts.builders import (
    KINDS_OF_CELLS,
    build_mitigated,
    build_model,
    mitigation_spec,
    random_tokens,
)
from tests.evaluation.small_models import PairTokenizer, measure, small_model


def naive(model: LanguageModel, text: torch.Tensor, position: int, start: int) -> float:
    """Compute EffRem by its definition: two contexts, each read separately."""
    with torch.no_grad():
        whole, cut = (
            torch.softmax(model(text[None, first:position]).logits[0, -1].double(), -1)
            for first in (0, start)
        )
    return float((whole - cut).abs().sum() / 2)


@pytest.mark.parametrize("kind", [*KINDS_OF_CELLS, "windowed"])
def test_remembrance_is_the_definition(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie, "PREFILL_TOKENS", 5)
    if kind == "windowed":
        model = build_mitigated([mitigation_spec("sliding_window")])
    else:
        model = build_model(kind, position="sinusoidal")
    texts, silent = random_tokens(2, 37, seed=4), Progress("", 0, unit="tokens", quiet=True)
    for position in (2, 11, 16, 18, 37):
        found = remembrance(model, texts[:, :position], silent)
        assert list(found) == [2**k for k in range(6) if 2**k < position]
        for kept, distances in found.items():
            for row, text in enumerate(texts):
                expected = naive(model, text, position, position - kept)
                assert float(distances[row]) == pytest.approx(expected, abs=1e-11), (position, kept)
        assert max(float(distances.max()) for distances in found.values()) > 1e-4


def test_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{k * 7919 % 1000} " for k in range(40)))
    one = small_model("one")
    asked: dict[str, Any] = {"texts": [tmp_path / "a.txt"], "positions": [8, 20]}
    outcome = measure(MemoryOptions(**asked, stretches=2), tmp_path / "r", one)
    (document,) = read_documents([tmp_path / "a.txt"], ByteTokenizer(), one.model)
    cell = next(c for c in outcome.cells if c.metric.endswith("20") and c.at == 4)
    pieces = [document.tokens[start : start + 20] for start in (0, 20)]
    expected = sum(naive(one.model, piece, 20, 16) for piece in pieces) / 2
    assert cell.estimate is not None
    assert cell.estimate.mean == pytest.approx(expected, abs=1e-6)
    part = (tmp_path / "r/rows.jsonl").read_bytes()
    measure(MemoryOptions(**asked, stretches=3), tmp_path / "r", one)
    whole = (tmp_path / "r/rows.jsonl").read_bytes()
    assert whole.startswith(part)
    assert whole.count(b"\n") == 6
    other, pairs = small_model("other", seed=1), small_model("pairs", tokenizer=PairTokenizer())
    both = measure(MemoryOptions(**asked), tmp_path / "both", one, other, pairs).cells
    compared = {cell.model for cell in both if cell.difference is not None}
    assert compared == {"other"}, "stretches of different tokens are not paired"
