"""Every kind of evaluation measures what a direct computation gives."""

from __future__ import annotations

import json
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
from longrnn.evaluation.bits import bits_per_byte
from longrnn.evaluation.passkey_grid import Grid
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import paired_proportion, proportion
from longrnn.results import read_results
from longrnn.text import ByteTokenizer
from tests.comparison.suites.small_models import SHORT, PairTokenizer, llama, points, small_model
from tests.refusals import naming

WORDS = [f"{i * 7919 % 1000} of {i * 104729 % 77} é. " for i in range(1200)]


def texts(folder: Path) -> list[str]:
    """Return two texts, of about 14,000 and 8,000 bytes."""
    (folder / "a.txt").write_text("".join(WORDS))
    (folder / "b.txt").write_text("".join(WORDS[::-1][:700]))
    return [str(folder / "a.txt"), str(folder / "b.txt")]


def perplexity(folder: Path, **changes: Any) -> BitsPerByte:
    options = {"texts": texts(folder), "lengths": ["64", "256", "512"], "windows": 3} | changes
    return BitsPerByte("books", 0, **options)


def test_passkey(tmp_path: Path) -> None:
    """The prompts and answers are those of `eval passkey`, under the right keys."""
    one = small_model("one")
    evaluation = PasskeyRetrieval("keys", 3, lengths=["200", "260"], depths=[0, 1], n=2)
    found = points(evaluation, one, tmp_path / "one.jsonl")
    rows = passkey.evaluate(
        [OpenCheckpoint("one", one.model, one.tokenizer)],
        Grid([200, 260], 2, [0, 1], seed=3),
        output=tmp_path / "eval.jsonl",
        quiet=True,
    )
    assert sorted(map(str, read_results(tmp_path / "one.jsonl")[1])) == sorted(map(str, rows))
    assert [(point.at, point.metric.name, point.reason) for point in found] == [
        (200, "keys", None), (260, "keys", None)
    ]  # fmt: skip
    for point in found:
        asked = [row for row in rows if row["length"] == point.at]
        assert point.samples == {
            f"{row['depth']}/{row['index']}": float(row["correct"]) for row in asked
        }
        assert len(point.samples) == 4


def test_passkey_in_a_text_counts_what_is_shared_once(tmp_path: Path) -> None:
    """Intervals over prompts of one book count its separate stretches."""
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night; the rain fell in torrents. " * 8)
    evaluation = PasskeyRetrieval("keys", 0, lengths=["200"], depths=[0, 1], n=8, filler=str(book))
    (point,) = points(evaluation, small_model("one"), tmp_path / "one.jsonl")
    _, rows = read_results(tmp_path / "one.jsonl")
    count = passkey.independent(rows)
    assert count is not None
    assert count < 8
    right = [1.0] * 16
    assert point.metric.estimate(right) == proportion(16, 16, count)
    assert point.metric.difference is not None
    assert point.metric.difference(right, right) == paired_proportion(right, right, count)


def test_passkey_beyond_the_model(tmp_path: Path) -> None:
    """A length is out of reach if the prompt fits but its answer does not."""
    short = small_model("short", position=SHORT)
    evaluation = PasskeyRetrieval("keys", 0, lengths=["200", "294", "295"], depths=[0.5], n=1)
    found = points(evaluation, short, tmp_path / "short.jsonl")
    # " 01234" is 6 bytes: 294 + 6 are the 300 positions that there are.
    assert [len(point.samples) for point in found] == [1, 1, 0]
    assert [point.reason for point in found[:2]] == [None, None]
    assert "300" in str(found[2].reason)


def test_passkey_too_short() -> None:
    """A length that is too short for the key raises a UserError."""
    evaluation = PasskeyRetrieval("keys", 0, lengths=["100", "1k"])
    with pytest.raises(UserError, match="100"):
        evaluation.prepare([small_model("one")])


@pytest.mark.parametrize("pairs", [False, True])
def test_perplexity(pairs: bool, tmp_path: Path) -> None:
    """Each column has the bits of the tokens between two lengths over their bytes, part by part."""
    one = small_model("one", tokenizer=PairTokenizer() if pairs else None)
    found = points(perplexity(tmp_path), one, tmp_path / "one.jsonl")
    assert [point.at for point in found] == [64, 256, 512]
    width = 2 if pairs else 1
    expected: list[list[float]] = []
    for text in (Path(path).read_text() for path in texts(tmp_path)):
        for part in range(3):
            piece = text[len(text) * part // 3 : len(text) * (part + 1) // 3]
            ids = torch.tensor([one.tokenizer.encode(piece)])
            with torch.no_grad():
                logits = one.model(ids[:, :512]).logits.double()
            nats = F.cross_entropy(logits[0], ids[0, 1:513], reduction="none")
            bits = nats / math.log(2) / width
            expected.append([float(bits[a:b].mean()) for a, b in ((0, 64), (64, 256), (256, 512))])
    values = [[bits_per_byte([sample]) for sample in point.samples.values()] for point in found]
    torch.testing.assert_close(
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64).T,
        atol=1e-5,
        rtol=1e-5,
    )
    assert len({*found[0].samples}) == 6


def test_models_with_different_tokenizers_score_the_same_bytes(tmp_path: Path) -> None:
    """Every part and column has the same bytes for both models, cut by tokens of the reference."""
    models = [small_model("bytes"), small_model("pairs", tokenizer=PairTokenizer())]
    evaluation = perplexity(tmp_path)
    evaluation.prepare(models)
    first, second = (
        evaluation.measure(model, tmp_path / f"{model.name}.jsonl", quiet=True) for model in models
    )
    for one, other, width in zip(first, second, (64, 192, 256), strict=True):
        sizes = {key: sample.n_bytes for key, sample in one.samples.items()}
        assert sizes == {key: sample.n_bytes for key, sample in other.samples.items()}
        assert len(sizes) == 6
        assert all(abs(size - width) <= 2 for size in sizes.values())


def test_rows_that_did_not_count_the_scored_bytes_are_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of an earlier version stay in the file, are not used, and cause a warning."""
    one, output = small_model("one"), tmp_path / "one.jsonl"
    found = points(perplexity(tmp_path), one, output)
    assert "earlier version" not in caplog.text
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for line in lines[1:]:
        line |= {"bytes_per_token": 1.0, "length": 512, "stretches": line.pop("nats")}
        del line["cuts"]
    for line in lines:
        del line["sha256"]
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = points(perplexity(tmp_path), one, output)
    assert [point.samples for point in again] == [point.samples for point in found]
    assert "again" in caplog.text


def test_perplexity_beyond_the_model(tmp_path: Path) -> None:
    """A model with a maximum length of 300 has losses up to 256, on the same parts."""
    short = small_model("short", position=SHORT)
    found = points(perplexity(tmp_path), short, tmp_path / "short.jsonl")
    assert [len(point.samples) for point in found] == [6, 6, 0]
    assert "300" in str(found[2].reason)
    assert {len(row["nats"]) for row in read_results(tmp_path / "short.jsonl")[1]} == {2}


def test_overlapping_windows_reach_beyond_the_model(tmp_path: Path) -> None:
    """Windows of 200 tokens score a text of 512 with a maximum of 300, and their cost is shown."""
    short = small_model("short", position=SHORT)
    evaluation = perplexity(tmp_path, context=200, stride=100)
    found = points(evaluation, short, tmp_path / "short.jsonl")
    losses, costs = found[::2], found[1::2]
    assert [len(point.samples) for point in losses] == [6, 6, 6]
    # 64; then 200 and 156; then 200 four times, the last one with 112 tokens.
    reads = [64 / 64, (200 + 156) / 256, (3 * 200 + 200 + 112) / 512]
    assert [point.samples[""] for point in costs] == pytest.approx(reads)
    assert [point.metric.name for point in costs] == ["books, tokens read per token"] * 3
    carried = points(perplexity(tmp_path), short, tmp_path / "carried.jsonl")
    key = next(iter(carried[0].samples))
    # The first 64 tokens are read from the empty state by both.
    assert losses[0].samples[key].nats == pytest.approx(carried[0].samples[key].nats, rel=1e-6)
    with pytest.raises(UserError, match="stride"):
        points(perplexity(tmp_path), short, tmp_path / "short.jsonl")
    with pytest.raises(UserError, match="stride"):
        perplexity(tmp_path, stride=100)


def test_perplexity_goes_on(tmp_path: Path) -> None:
    """Adding a length measures the parts again; nothing else does."""
    one, output = small_model("one"), tmp_path / "one.jsonl"
    few = perplexity(tmp_path, texts=texts(tmp_path)[:1], lengths=["64", "256"])
    before = points(few, one, output)
    content = output.read_bytes()
    assert points(few, one, output) == before
    assert output.read_bytes() == content
    # A torn last row, as a kill leaves it.
    output.write_bytes(content[:-5])
    for point, known in zip(points(few, one, output), before, strict=True):
        for key, sample in point.samples.items():
            assert tuple(sample) == pytest.approx(tuple(known.samples[key]), rel=1e-6)
    more = points(perplexity(tmp_path), one, output)
    assert [len(point.samples) for point in more] == [6, 6, 6]
    assert len(read_results(output)[1]) == 3 + 6
    with pytest.raises(UserError, match="model"):
        points(perplexity(tmp_path), small_model("one", seed=1), output)


def test_perplexity_of_short_texts(tmp_path: Path) -> None:
    """A text that is too short is refused before anything is measured."""
    with pytest.raises(UserError, match="8k"):
        perplexity(tmp_path, lengths=["8k"]).prepare([small_model("one")])
    with pytest.raises(UserError, match="text"):
        perplexity(tmp_path, texts=["none.txt"]).prepare([small_model("one")])
    (tmp_path / "c.txt").write_text((tmp_path / "a.txt").read_text())
    twice = [*texts(tmp_path), str(tmp_path / "c.txt")]
    with pytest.raises(UserError, match=naming("a.txt", "c.txt")):
        perplexity(tmp_path, texts=twice).prepare([small_model("one")])


def test_cost(tmp_path: Path) -> None:
    """Each length is measured once in its own process, and lengths out of reach have a reason."""
    one = small_model("one", folder=tmp_path / "one", position=SHORT)
    evaluation = Cost("cost", 0, lengths=["64", "4k"], decode=2)
    found = points(evaluation, one, tmp_path / "cost.jsonl")
    near = {point.metric.name: point for point in found if point.at == 64}
    assert list(near["state or cache, bytes"].samples.values()) == [
        states.nbytes(one.model.init_state(1))
    ]
    assert all(value > 0 for p in near.values() for value in p.samples.values())
    far = [point for point in found if point.at == 4096]
    assert len(far) == 5
    assert all("300" in str(point.reason) and not point.samples for point in far)
    content = (tmp_path / "cost.jsonl").read_bytes()
    assert points(evaluation, one, tmp_path / "cost.jsonl") == found
    assert (tmp_path / "cost.jsonl").read_bytes() == content


def test_a_cost_that_cannot_be_measured(tmp_path: Path) -> None:
    """A failed measurement is not recorded and is repeated the next time."""
    gone = small_model("gone")._replace(source=str(tmp_path / "gone"))
    found = points(Cost("cost", 0, lengths=["64"]), gone, tmp_path / "c.jsonl")
    assert all("checkpoint" in str(point.reason) for point in found)
    assert read_results(tmp_path / "c.jsonl")[1] == []


def test_every_kind_is_tested() -> None:
    """Every registered kind is tested here."""
    known = {PasskeyRetrieval, BitsPerByte, Cost}
    assert known <= set(EVALUATIONS.values())
    assert isinstance(small_model("one"), OpenCheckpoint)


def test_tasks_of_lm_eval(tmp_path: Path) -> None:
    """Scores are those of lm-eval, are measured once, and truncated prompts give a reason."""
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
    assert all(number in str(point.reason) for number in ("5", "256"))
    with pytest.raises(UserError, match=naming("acc", 300)):
        Harness("lm-eval", 0, **{**options, "metrics": ["acc"]}).measure(
            good, tmp_path / "good.jsonl", quiet=True
        )
