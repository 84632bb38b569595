"""Effective remembrance in one pass equals its definition, one context after another."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.evaluation.memory import MeanEffRem, enough, evaluate, remembrance, starts, summarise
from longrnn.evaluation.texts import Document
from longrnn.inference import trie
from longrnn.intervals import Estimate
from longrnn.models import LanguageModel
from longrnn.results import read_results
from tests.contracts.builders import build_mitigated, build_model, mitigation_spec, random_tokens
from tests.inference.test_prefix import Watched


def naive(model: LanguageModel, text: torch.Tensor, position: int, start: int) -> float:
    """Compute EffRem by its definition: two contexts, each read separately."""
    with torch.no_grad():
        whole, cut = (
            torch.softmax(model(text[None, first:position]).logits[0, -1].double(), -1)
            for first in (0, start)
        )
    return float((whole - cut).abs().sum() / 2)


def assert_defined(model: LanguageModel, positions: list[int]) -> None:
    texts = random_tokens(2, positions[-1] + 3, seed=4)
    found = remembrance(model, texts, positions)
    assert set(found) == {(T, t) for T in positions for t in starts(T)}
    for (position, start), distances in found.items():
        for row, text in enumerate(texts):
            expected = naive(model, text, position, start)
            assert float(distances[row]) == pytest.approx(expected, abs=1e-11), (position, start)
    assert max(float(distances.max()) for distances in found.values()) > 1e-4


@pytest.mark.parametrize("kind", list(MIXERS))
def test_one_pass_is_the_definition(kind: str) -> None:
    """One pass over all starts gives the EffRem of separate contexts."""
    assert_defined(build_model(kind, position="sinusoidal"), [2, 11, 16, 37])


def test_in_pieces_and_under_a_mitigation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long pieces and a mitigation's carry give the EffRem of separate contexts."""
    monkeypatch.setattr(trie, "PREFILL_TOKENS", 5)
    assert_defined(build_mitigated([mitigation_spec("sliding_window")]), [30])


def test_no_token_is_read_twice() -> None:
    """Starts that several T share are read once."""
    model, positions = Watched(build_model("gru")), [16, 64]
    remembrance(model, random_tokens(3, 64), positions)
    ends = {start: T for T in positions for start in [0, *starts(T)]}
    assert model.tokens == 3 * sum(end - start for start, end in ends.items())
    assert model.tokens < 3 * sum(T + sum(T - t for t in starts(T)) for T in positions)


def test_starts() -> None:
    """Starts are powers of two from both ends of the context, ascending."""
    assert starts(2) == [1]
    assert starts(16) == [1, 2, 4, 8, 12, 14, 15]
    assert starts(10) == [1, 2, 4, 6, 8, 9]
    assert {4096, 8192, 12288} <= set(starts(16384))


def document(seed: int, tokens: int) -> Document:
    return Document(f"{seed}.txt", str(seed), random_tokens(1, tokens, seed)[0])


def test_rows_go_on(tmp_path: Path) -> None:
    """A resumed evaluation measures only what is missing; another model is refused."""
    model, output = build_model("lstm"), tmp_path / "r.jsonl"
    asked: dict[str, Any] = {"positions": [8, 20], "output": output, "quiet": True}
    texts = [document(0, 70), document(1, 45)]
    rows = evaluate(model, texts[:1], batch_size=1, **asked)
    assert [row["first"] for row in rows[:: len(starts(8)) + len(starts(20))]] == [0, 20, 40]
    for row in rows:
        piece = texts[0].tokens[row["first"] :]
        expected = naive(model, piece, row["position"], row["start"])
        assert row["effrem"] == pytest.approx(expected, abs=1e-11)
    before = output.read_bytes()
    watched = Watched(model)
    more = evaluate(watched, texts, **asked)
    assert more[: len(rows)] == rows
    assert watched.tokens == 2 * sum(
        end - start for start, end in {t: T for T in (8, 20) for t in [0, *starts(T)]}.items()
    )
    assert output.read_bytes().startswith(before)
    assert len(read_results(output)[1]) == len(more)
    assert len(evaluate(model, texts, stretches=1, **asked)) == len(more) * 2 // 5
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:-3]))
    evaluate(model, texts, **asked)
    assert output.read_bytes().startswith(b"".join(lines[:-3]))
    assert len(read_results(output)[1]) == len(more), "no row is measured twice"
    with pytest.raises(UserError, match="different model"):
        evaluate(build_model("gru"), texts, **asked)
    with pytest.raises(UserError, match="tokenizer"):
        evaluate(model, [texts[0]._replace(tokenizer="another")], **asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": [1, 8]}, "positions"),
        ({"stretches": 0}, ""),
        ({"batch_size": 0}, ""),
        ({"positions": [64]}, ""),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Invalid settings leave no results file."""
    asked = {"positions": [8], "output": tmp_path / "r.jsonl", "quiet": True, **changes}
    with pytest.raises(UserError, match=message):
        evaluate(build_model("gru"), [document(0, 40)], **asked)
    assert not list(tmp_path.iterdir())


def test_summaries() -> None:
    """Intervals are cut to [0, 1]; a context is enough only if all longer ones are."""
    rows = [
        {"position": T, "start": t, "effrem": value, "text_sha256": str(i), "first": 0}
        for (T, t), i in product([(8, 1), (8, 4), (16, 2)], range(2))
        for value in [0.02 if i else 0.0]
    ]
    found = summarise(rows)
    assert list(found) == [8, 16]
    assert [point.start for point in found[8]] == [1, 4]
    assert found[8][0].effrem == (0.01, 0.0, pytest.approx(0.137, abs=1e-3), 2)

    def points(*means: float) -> list[MeanEffRem]:
        return [MeanEffRem(2**k, Estimate(mean, 0, 1, 3)) for k, mean in enumerate(means)]

    assert enough(points(0.0, 0.1, 0.2, 0.0), 16) == 14
    assert enough(points(0.2, 0.0), 16) is None
    assert enough(points(0.0, 0.0), 16) == 14
