"""Several evaluations of several models: cells, differences, reports, suites, and refusals."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import longrnn
from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.errors import UserError
from longrnn.evaluation.base import Evaluation
from longrnn.evaluation.options import EVALUATIONS, CostOptions
from longrnn.evaluation.run import read_suite, run, run_and_report
from longrnn.reporting.tables import ResultTable
from tests.cli.conftest import table
from tests.evaluation.small_models import SHORT, PairTokenizer, small_model
from tests.pages import read_tables
from tests.refusals import naming
from tests.texts import DATA

PAIRS = f"pairs of {'bytes ' * 12}"  # as long as a reason
SUITE = """
evaluations:
  - {kind: passkey, lengths: [200, 320], depths: [0.0, 1.0], n: 2, name: keys}
  - {kind: perplexity, texts: [TEXT], lengths: [64, 256], windows: 3}
"""


def suite(folder: Path, text: str = SUITE) -> list[Evaluation[Any]]:
    book = folder / "book.txt"
    book.write_text("".join(f"{i * 7919 % 1000} and {i % 77}. " for i in range(300)))
    (folder / "mine.yaml").write_text(text.replace("TEXT", str(book)))
    return read_suite(str(folder / "mine.yaml"))


def measure(models: Sequence[OpenCheckpoint], folder: Path) -> list[ResultTable]:
    return run(models, suite(folder), folder / "out", quiet=True)


@pytest.fixture(scope="module")
def models() -> list[OpenCheckpoint]:
    return [
        small_model("one"),
        small_model("two", seed=1),
        small_model("short", seed=2, position=SHORT),
        small_model(PAIRS, seed=3, tokenizer=PairTokenizer()),
    ]


def test_the_report_has_every_cell_of_every_model(
    models: list[OpenCheckpoint], tmp_path: Path
) -> None:
    outcomes, files = run_and_report(models, suite(tmp_path), tmp_path / "out", quiet=True)
    assert {file.name for file in files} == {
        "cells.json",
        "report.html",
        "keys_keys_recalled.png",
        "keys_by_position.png",
        "perplexity_bits_per_byte_by_position.png",
    }
    record = json.loads((tmp_path / "out/cells.json").read_text())
    assert list(record["models"]) == ["one", "two", "short", PAIRS]
    assert list(record["evaluations"]) == ["keys", "perplexity"]
    assert len(record["cells"]) == sum(len(outcome.cells) for outcome in outcomes)
    first = next(cell for cell in record["cells"] if cell["at"] == 200)
    assert (first["model"], first["estimate"]["n"], first["difference"]) == ("one", 2, None)
    texts = outcomes[0].texts()
    lines = [" | ".join(row) for row in texts]
    assert lines[0].startswith("length | model | n | depth 0% | depth 100% |")
    (beyond,) = (line for line in lines if line.startswith("320 | short "))
    assert "300" in beyond
    assert "\n" in next(line for line in lines if line.startswith("320 | two "))
    page = (tmp_path / "out/report.html").read_text()
    assert "<h1>one against 3 others</h1>" in page
    tables = read_tables(page)
    for outcome, read in zip(outcomes, tables, strict=False):
        shown = [["".join(text.split()) for text in row] for row in outcome.texts()]
        assert read == shown
    compared = dict(tables[len(outcomes)])
    assert [*compared][:4] == ["".join(model.name.split()) for model in models]
    assert models[1].model.fingerprint() in compared["two"]


def test_evaluate_is_public(tmp_path: Path) -> None:
    spec = {"kind": "passkey", "lengths": "256,300", "depths": "0,1", "n": 2}
    cells = longrnn.evaluate("passkey-tiny", spec, tmp_path)
    assert [cell.at for cell in cells if cell.metric.startswith("passkey")] == [256, 300]
    assert (tmp_path / "report.html").is_file()
    kept = (tmp_path / "rows.jsonl").read_bytes()
    assert longrnn.evaluate(["passkey-tiny"], [spec], tmp_path) == cells
    assert (tmp_path / "rows.jsonl").read_bytes() == kept


def test_refused_before_anything_is_written(models: list[OpenCheckpoint], tmp_path: Path) -> None:
    unfit = models[0]._replace(name="unfit", tokenizer=PairTokenizer())
    with pytest.raises(UserError, match=naming("unfit", 997, 256)):
        measure([models[0], unfit], tmp_path)
    with pytest.raises(UserError, match="one"):
        measure([models[0], models[0]], tmp_path)
    for given in ([], suite(tmp_path)), (models, []):
        with pytest.raises(UserError, match="model"):
            run(*given, tmp_path / "out")
    twice = SUITE.replace("name: keys", "name: perplexity")
    with pytest.raises(UserError, match="perplexity"):
        run(models[:1], suite(tmp_path, twice), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_are_found_by_the_options_that_values_depend_on(
    models: list[OpenCheckpoint], tmp_path: Path
) -> None:
    overlaps = "context: 9, stride: 8", "context: 9, stride: 7", "context: 8, stride: 8"
    for kind, *options in (
        ("passkey", "n: 2", "seed: 1", "n_keys: 2", "chunk_select: 99", "filler: TEXT"),
        ("perplexity", "windows: 2", *overlaps),
        ("cost", "decode: 1", "decode: 2"),
    ):
        given = [f"evaluations: [{{kind: {kind}, {one}}}]" for one in options]
        found = [suite(tmp_path, text)[0].protocol(models[0]) for text in given]
        assert [one for one in found if found.count(one) > 1] == []


@pytest.mark.parametrize(("text", "names"), table((DATA / "suites.txt").read_text(), {}))
def test_suites_that_are_not_valid(text: str, names: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming("mine.yaml", *names)):
        suite(tmp_path, text)


def test_suites(tmp_path: Path) -> None:
    text = "seed: 5\nevaluations: [{kind: cost}, {kind: passkey, seed: 3}]"
    cost, passkey = suite(tmp_path, text)
    assert "seed" not in cost.options.model_dump(), "it has no seed"
    assert passkey.options.seed == 3
    (passkey,) = suite(tmp_path, "seed: 5\nevaluations: [{kind: passkey}]")
    assert passkey.options.seed == 5
    for name in ("quick", "long", "needles", "books", "ruler"):
        assert read_suite(name)
    with pytest.raises(UserError, match="quick"):
        read_suite("qick")


def test_an_evaluation_whose_options_extend_those_of_another_is_of_its_own_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Further(CostOptions):
        pass

    monkeypatch.setitem(EVALUATIONS, "further", Further)
    kinds = [options(lengths=[8]).evaluation().kind for options in (CostOptions, Further)]
    assert kinds == ["cost", "further"]
