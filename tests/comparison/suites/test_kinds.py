"""What the kinds of evaluation measure, against the same by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longrnn import load, load_tokenizer
from longrnn import state as states
from longrnn.comparison.suites import (
    EVALUATIONS,
    BitsPerByte,
    Cost,
    Harness,
    PasskeyRetrieval,
)
from longrnn.errors import UserError
from longrnn.evaluation import passkey
from longrnn.evaluation.passkey_grid import Grid
from longrnn.hf.opened import OpenCheckpoint
from longrnn.results import read_results
from longrnn.text import ByteTokenizer
from tests.comparison.suites.small_models import SHORT, PairTokenizer, llama, small_model

WORDS = [f"{i * 7919 % 1000} of {i * 104729 % 77} é. " for i in range(1200)]


def texts(folder: Path) -> list[str]:
    """Two texts, of about 14,000 and 8,000 bytes."""
    (folder / "a.txt").write_text("".join(WORDS))
    (folder / "b.txt").write_text("".join(WORDS[::-1][:700]))
    return [str(folder / "a.txt"), str(folder / "b.txt")]


def perplexity(folder: Path, **changes: Any) -> BitsPerByte:
    options = {"texts": texts(folder), "lengths": ["64", "256", "512"], "windows": 3} | changes
    return BitsPerByte("books", 0, **options)


def test_passkey(tmp_path: Path) -> None:
    """Other prompts than `eval passkey` asks, or samples under the key of another one."""
    one = small_model("one")
    evaluation = PasskeyRetrieval("keys", 3, lengths=["200", "260"], depths=[0, 1], n=2)
    points = evaluation.measure(one, tmp_path / "one.jsonl", quiet=True)
    rows = passkey.evaluate(
        [OpenCheckpoint("one", one.model, one.tokenizer)],
        Grid([200, 260], 2, [0, 1], seed=3),
        output=tmp_path / "eval.jsonl",
        quiet=True,
    )
    assert sorted(map(str, read_results(tmp_path / "one.jsonl")[1])) == sorted(map(str, rows))
    assert [(point.at, point.metric.name, point.reason) for point in points] == [
        (200, "keys", None), (260, "keys", None)
    ]  # fmt: skip
    for point in points:
        asked = [row for row in rows if row["length"] == point.at]
        assert point.samples == {
            f"{row['depth']}/{row['index']}": float(row["correct"]) for row in asked
        }
        assert len(point.samples) == 4


def test_passkey_beyond_the_model(tmp_path: Path) -> None:
    """A prompt that fits, but not with its answer; a comparison that ends there."""
    short = small_model("short", position=SHORT)
    evaluation = PasskeyRetrieval("keys", 0, lengths=["200", "294", "295"], depths=[0.5], n=1)
    points = evaluation.measure(short, tmp_path / "short.jsonl", quiet=True)
    # " 01234" is 6 bytes: 294 + 6 are the 300 positions that there are.
    assert [len(point.samples) for point in points] == [1, 1, 0]
    assert [point.reason for point in points[:2]] == [None, None]
    assert "300" in str(points[2].reason)


def test_passkey_too_short() -> None:
    """A prompt that cannot hold the key is the suite's fault, not a model's."""
    evaluation = PasskeyRetrieval("keys", 0, lengths=["100", "1k"])
    with pytest.raises(UserError, match="length 100 is too short .* the least is .* of one"):
        evaluation.check(small_model("one"))


@pytest.mark.parametrize("pairs", [False, True])
def test_perplexity(pairs: bool, tmp_path: Path) -> None:
    """Positions that are shifted, parts that overlap, bytes of another tokenizer."""
    one = small_model("one", tokenizer=PairTokenizer() if pairs else None)
    points = perplexity(tmp_path).measure(one, tmp_path / "one.jsonl", quiet=True)
    assert [point.at for point in points] == [64, 256, 512]
    expected: list[list[float]] = []
    for text in (Path(path).read_text() for path in texts(tmp_path)):
        for part in range(3):
            piece = text[len(text) * part // 3 : len(text) * (part + 1) // 3]
            ids = torch.tensor([one.tokenizer.encode(piece)])
            with torch.no_grad():
                logits = one.model(ids[:, :512]).logits.double()
            nats = F.cross_entropy(logits[0], ids[0, 1:513], reduction="none")
            bits = nats / math.log(2) * ids.shape[1] / len(piece.encode())
            expected.append([float(bits[a:b].mean()) for a, b in ((0, 64), (64, 256), (256, 512))])
    found = [list(point.samples.values()) for point in points]
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64).T,
        atol=1e-5,
        rtol=1e-5,
    )
    assert len({*points[0].samples}) == 6
    bytes_ = small_model("bytes")
    theirs = perplexity(tmp_path).measure(bytes_, tmp_path / "bytes.jsonl", quiet=True)
    assert points[0].samples.keys() == theirs[0].samples.keys()


def test_perplexity_beyond_the_model(tmp_path: Path) -> None:
    """A model that ends at 300 has its losses up to 256, on the same parts."""
    short = small_model("short", position=SHORT)
    points = perplexity(tmp_path).measure(short, tmp_path / "short.jsonl", quiet=True)
    assert [len(point.samples) for point in points] == [6, 6, 0]
    assert "300" in str(points[2].reason)
    assert {row["length"] for row in read_results(tmp_path / "short.jsonl")[1]} == {256}


def test_perplexity_goes_on(tmp_path: Path) -> None:
    """Parts that are read again, or a length that is answered from a shorter reading."""
    one, output = small_model("one"), tmp_path / "one.jsonl"
    few = perplexity(tmp_path, texts=texts(tmp_path)[:1], lengths=["64", "256"])
    before = few.measure(one, output, quiet=True)
    content = output.read_bytes()
    assert few.measure(one, output, quiet=True) == before
    assert output.read_bytes() == content
    # A torn last row, as a kill leaves it.
    output.write_bytes(content[:-5])
    for point, known in zip(few.measure(one, output, quiet=True), before, strict=True):
        assert point.samples == pytest.approx(known.samples, abs=1e-6)
    more = perplexity(tmp_path).measure(one, output, quiet=True)
    assert [len(point.samples) for point in more] == [6, 6, 6]
    assert len(read_results(output)[1]) == 3 + 6
    with pytest.raises(UserError, match="different model"):
        perplexity(tmp_path).measure(small_model("one", seed=1), output, quiet=True)


def test_perplexity_of_short_texts(tmp_path: Path) -> None:
    """A text that ends in the middle of a window is refused before anything is measured."""
    with pytest.raises(UserError, match="has .* tokens with the tokenizer of one and 8k needs"):
        perplexity(tmp_path, lengths=["8k"]).check(small_model("one"))
    with pytest.raises(UserError, match="no text file"):
        perplexity(tmp_path, texts=["none.txt"]).check(small_model("one"))
    (tmp_path / "c.txt").write_text((tmp_path / "a.txt").read_text())
    twice = [*texts(tmp_path), str(tmp_path / "c.txt")]
    with pytest.raises(UserError, match=r"c\.txt and .*a\.txt are the same text"):
        perplexity(tmp_path, texts=twice).check(small_model("one"))


def test_cost(tmp_path: Path) -> None:
    """A state of another size, a length that is measured twice, or one that cannot be reached."""
    one = small_model("one", folder=tmp_path / "one", position=SHORT)
    evaluation = Cost("cost", 0, lengths=["64", "4k"], decode=2)
    points = evaluation.measure(one, tmp_path / "cost.jsonl", quiet=True)
    near = {point.metric.name: point for point in points if point.at == 64}
    assert list(near["state or cache, bytes"].samples.values()) == [
        states.nbytes(one.model.init_state(1))
    ]
    assert all(value > 0 for p in near.values() for value in p.samples.values())
    far = [point for point in points if point.at == 4096]
    assert len(far) == 5
    assert all("300" in str(point.reason) and not point.samples for point in far)
    content = (tmp_path / "cost.jsonl").read_bytes()
    assert evaluation.measure(one, tmp_path / "cost.jsonl", quiet=True) == points
    assert (tmp_path / "cost.jsonl").read_bytes() == content


def test_a_cost_that_cannot_be_measured(tmp_path: Path) -> None:
    """A failure that is recorded as if it were a result."""
    gone = small_model("gone")._replace(checkpoint=str(tmp_path / "gone"))
    points = Cost("cost", 0, lengths=["64"]).measure(gone, tmp_path / "c.jsonl", quiet=True)
    assert all("no checkpoint" in str(point.reason) for point in points)
    assert read_results(tmp_path / "c.jsonl")[1] == []


def test_every_kind_is_tested() -> None:
    """A kind that nobody measures by hand."""
    known = {PasskeyRetrieval, BitsPerByte, Cost}
    assert known <= set(EVALUATIONS.values())
    assert isinstance(small_model("one"), OpenCheckpoint)


def test_tasks_of_lm_eval(tmp_path: Path) -> None:
    """Other scores than lm-eval's, tasks that are asked again, or prompts cut without a word."""
    metadata = {"max_seq_lengths": [300], "n": 5}
    options = {"tasks": ["longrnn_passkey"], "metrics": ["accuracy"], "metadata": metadata}
    evaluation = Harness("lm-eval", 0, **options)
    checkpoint = "passkey-tiny"
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    good = OpenCheckpoint(checkpoint, model, tokenizer, checkpoint)
    (point,) = evaluation.measure(good, tmp_path / "good.jsonl", quiet=True)
    assert (point.metric.name, point.at, point.reason) == ("longrnn_passkey, accuracy", None, None)
    assert point.samples == {str(document): 1.0 for document in range(5)}
    assert str(point.metric.estimate(list(point.samples.values()))) == "1.00 [0.57, 1.00]"
    written = (tmp_path / "good.jsonl").read_bytes()
    assert evaluation.measure(good, tmp_path / "good.jsonl", quiet=True) == [point]
    assert (tmp_path / "good.jsonl").read_bytes() == written
    llama(tmp_path / "llama", positions=256)
    short = load(tmp_path / "llama")
    cut = OpenCheckpoint("llama", short, ByteTokenizer(), str(tmp_path / "llama"), None, "cpu")
    (point,) = evaluation.measure(cut, tmp_path / "cut.jsonl", quiet=True)
    assert point.samples == {}
    assert point.reason == "5 requests exceed the 256 tokens that it reads"
    with pytest.raises(UserError, match="has no metric 'acc': it has 300, accuracy"):
        Harness("lm-eval", 0, **{**options, "metrics": ["acc"]}).measure(
            good, tmp_path / "good.jsonl", quiet=True
        )
