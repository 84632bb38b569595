"""Comparisons of small models: paired differences, resuming, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from longrnn.comparison.compare import Cell, compare, markdown, tables
from longrnn.comparison.suites import Suite, read_suite
from longrnn.errors import UserError
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import Estimate, proportion, ratio_mean
from longrnn.results import read_results
from tests.comparison.suites.small_models import SHORT, PairTokenizer, small_model
from tests.refusals import naming

SUITE = """
evaluations:
  - {kind: passkey, lengths: [200, 320], depths: [0.0, 1.0], n: 2, name: keys}
  - {kind: perplexity, texts: [TEXT], lengths: [64, 256], windows: 3}
"""


def suite(folder: Path, text: str = SUITE, name: str = "mine") -> Suite:
    book = folder / "book.txt"
    book.write_text("".join(f"{i * 7919 % 1000} and {i % 77}. " for i in range(300)))
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("TEXT", str(book)))
    return read_suite(str(path))


def run(models: Sequence[OpenCheckpoint], folder: Path, *suites: Suite) -> list[Cell]:
    return compare(models, suites or [suite(folder)], output=folder / "out", quiet=True)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def models() -> list[OpenCheckpoint]:
    return [
        small_model("one"),
        small_model("two", seed=1),
        small_model("short", seed=2, position=SHORT),
        small_model("pairs", seed=3, tokenizer=PairTokenizer()),
    ]


def test_cells(models: list[OpenCheckpoint], tmp_path: Path) -> None:
    """Differences pair equal items and are relative to the reference; reasons are kept."""
    cells = {(cell.metric, cell.at, cell.model): cell for cell in run(models, tmp_path)}
    assert len(cells) == 2 * 2 * 4
    _, one = read_results(tmp_path / "out/mine/perplexity/one.jsonl")
    _, two = read_results(tmp_path / "out/mine/perplexity/two.jsonl")
    bits = [
        {row["part"]: row["nats"][1] / 0.6931471805599453 for row in rows} for rows in (one, two)
    ]
    sizes = [row["cuts"][2] - row["cuts"][1] for row in one]
    assert sizes == [row["cuts"][2] - row["cuts"][1] for row in two]
    cell = cells["perplexity, bits per byte", 256, "two"]
    assert cell.estimate == pytest.approx(ratio_mean(list(bits[1].values()), sizes))
    less = [bits[1][part] - bits[0][part] for part in range(3)]
    assert cell.difference == pytest.approx(ratio_mean(less, sizes))
    assert cells["perplexity, bits per byte", 256, "one"].difference is None
    # The same parts of the text under another tokenizer.
    assert cells["perplexity, bits per byte", 64, "pairs"].difference is not None

    asked = cells["keys", 200, "two"]
    assert asked.estimate == proportion(0, 4)
    assert asked.difference is not None
    assert asked.difference.n == 4
    beyond = cells["keys", 320, "short"]
    assert (beyond.estimate, beyond.difference) == (None, None)
    assert "300" in str(beyond)
    assert cells["perplexity, bits per byte", 256, "short"].estimate is not None

    recorded = [
        json.loads(line) for line in (tmp_path / "out/comparison.jsonl").read_text().splitlines()
    ]
    assert len(recorded) == len(cells)
    first = {"suite": "mine", "metric": "keys", "model": "one", "at": 200, "reason": None}
    assert first.items() <= recorded[0].items()
    assert recorded[0]["estimate"]["n"] == 4


def test_it_goes_on(models: list[OpenCheckpoint], tmp_path: Path) -> None:
    """Adding a model or a length measures only what is missing."""
    cells = run(models[:2], tmp_path)
    before = files(tmp_path / "out")
    assert run(models[:2], tmp_path) == cells
    assert files(tmp_path / "out") == before
    # As after kill -9: the last row is torn, and what came after it is not there.
    torn = tmp_path / "out/mine/keys/two.jsonl"
    torn.write_bytes(before["mine/keys/two.jsonl"][:-7])
    (tmp_path / "out/mine/perplexity/two.jsonl").unlink()
    (tmp_path / "out/comparison.jsonl").unlink()
    run(models[:2], tmp_path)
    assert files(tmp_path / "out") == before

    longer = SUITE.replace("[200, 320]", "[200, 260, 320]").replace("n: 2", "n: 3")
    more = run(models[:3], tmp_path, suite(tmp_path, longer))
    assert len(more) == 3 * (3 + 2)
    after = files(tmp_path / "out")
    assert after["mine/keys/one.jsonl"].startswith(before["mine/keys/one.jsonl"])
    same = "mine/perplexity/one.jsonl"
    assert after[same] == before[same]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("kind: passkey,", "kind: passkey, n_keys: 2,", "keys"),
        ("windows: 3", "windows: 2", ""),
        ("evaluations:", "seed: 5\nevaluations:", "seed"),
    ],
)
def test_results_of_another_suite(
    before: str, after: str, says: str, models: list[OpenCheckpoint], tmp_path: Path
) -> None:
    """Results of another suite with the same name are refused."""
    run(models[:1], tmp_path)
    there = files(tmp_path / "out")
    other = suite(tmp_path, SUITE.replace(before, after))
    with pytest.raises(UserError, match=naming(says)):
        run(models[:1], tmp_path, other)
    assert files(tmp_path / "out") == there
    (tmp_path / "out/mine/suite.yaml").write_text("{broken")
    with pytest.raises(UserError, match="YAML"):
        run(models[:1], tmp_path)


def test_results_of_another_model(models: list[OpenCheckpoint], tmp_path: Path) -> None:
    """Another checkpoint under a known name is refused."""
    run(models[:1], tmp_path)
    there = files(tmp_path / "out")
    with pytest.raises(UserError, match="output"):
        run([models[1]._replace(name="one")], tmp_path)
    assert files(tmp_path / "out") == there


def test_refused_before_anything_is_written(models: list[OpenCheckpoint], tmp_path: Path) -> None:
    """What can be checked is checked before anything is measured."""
    unfit = models[0]._replace(name="unfit", tokenizer=PairTokenizer())
    with pytest.raises(UserError, match=naming("unfit", 997, 256)):
        run([models[0], unfit], tmp_path)
    long = suite(tmp_path, SUITE.replace("[64, 256]", "[8k]"))
    with pytest.raises(UserError, match="texts"):
        run(models[:1], tmp_path, long)
    with pytest.raises(UserError, match="one"):
        run([models[0], models[0]], tmp_path)
    twice = [suite(tmp_path), suite(tmp_path)]
    with pytest.raises(UserError, match="mine"):
        run(models[:1], tmp_path, *twice)
    assert not (tmp_path / "out").exists()


def cell(model: str, at: int | None, metric: str = "m", **changes: object) -> Cell:
    known = Cell("s", metric, model, at, Estimate(0.5, 0.25, 0.75, 9), None, None, ".2f")
    return known._replace(**changes)  # type: ignore[arg-type]


def test_tables() -> None:
    """Tables list lengths in ascending order, with each value in the row of its model."""
    less = Estimate(-0.25, -0.5, 0.0, 9)
    cells = [
        cell("a", 1024), cell("a", 64), cell("b", 64, difference=less),
        cell("b", 1024, estimate=None, reason="too long"), cell("b", None, "acc"),
    ]  # fmt: skip
    (table,) = tables(cells)
    assert table.metrics == ["m", "acc"]
    assert [row[:2] for row in table.rows] == [
        (None, "a"), (None, "b"), (64, "a"), (64, "b"), (1024, "a"), (1024, "b")
    ]  # fmt: skip
    lines = markdown(table)
    assert lines[0] == "| length | model | m | acc |"
    assert "| – | b | – | 0.50 [0.25, 0.75] |" in lines
    assert "| 64 | b | 0.50 [0.25, 0.75]<br>−0.25 [−0.50, +0.00] | – |" in lines
    assert "| 1k | b | too long | – |" in lines
    # A reason is written out once in a row, and a hair below zero is zero.
    gone = [cell("a", 1, metric, estimate=None, reason="too long") for metric in ("m", "n", "o")]
    assert markdown(tables([*gone, cell("a", 1, "p")])[0])[2] == (
        "| 1 | a | too long | likewise | likewise | 0.50 [0.25, 0.75] |"
    )
    assert str(cell("a", 1, estimate=Estimate(-0.001, -0.25, 0.25, 9))) == "0.00 [−0.25, 0.25]"
    assert str(cell("a", 1, estimate=Estimate(1234.0, -1e999, 1e999, 1), form=",.0f")) == "1,234"
