"""Passkey evaluation of models with known answers."""

from pathlib import Path
from typing import Any, cast

import pytest

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.data import Passkey, prompts
from longrnn.errors import UserError
from longrnn.evaluation.options import PasskeyOptions
from longrnn.inference import trie
from longrnn.intervals import paired_proportion, proportion
from longrnn.reporting.tables import ResultTable
from longrnn.text import ByteTokenizer
from tests.evaluation import small_models
from tests.evaluation.small_models import SHORT, Oracle, cells, rows, small_model
from tests.refusals import naming
from tests.texts import trained_bpe

pytestmark = pytest.mark.core

ALL = "passkey, keys recalled"
GRID: dict[str, Any] = {"lengths": [160, 300], "depths": [0.0, 0.5, 1.0], "n": 3, "batch_size": 4}
INSERTED: dict[str, Any] = {"lengths": [200, 300, 400], "insert_at": [0, 100, 200], "n": 3}


def measure(folder: Path, *models: Any, **options: Any) -> ResultTable:
    return small_models.measure(PasskeyOptions(**(options or GRID)), folder, *models)


def keys(folder: Path) -> dict[tuple[Any, ...], str]:
    return {tuple(row["item"].values()): row["result"]["key"] for row in rows(folder)}


def test_an_oracle_is_right_everywhere_and_each_row_can_be_checked(tmp_path: Path) -> None:
    """A model that always recalls has a share of 1; keys are held out from training."""
    oracle = Oracle()
    found = measure(tmp_path, oracle)
    assert oracle.prompts == 18
    assert all(cell.estimate and cell.estimate.mean == 1 for cell in found.cells)
    assert str(cells(found)[ALL, 160, "model0"]) == "1.00 [0.70, 1.00]"
    written = rows(tmp_path)
    assert {tuple(row["item"].values()) for row in written} == {
        (t, d, i) for t in (160, 300) for d in (0.0, 0.5, 1.0) for i in range(3)
    }
    for row in written:
        assert (row["model"], row["tokenizer"]) == ("oracle", "bytes")
        assert row["result"]["said"] == row["result"]["key"]
        assert row["result"]["key"] in prompts.keys(True)
    assert len(set(keys(tmp_path).values())) > 7


def test_models_are_asked_the_same_and_compared(tmp_path: Path) -> None:
    others = Oracle(forgets=300, name="other"), Oracle(name="third")
    found = cells(measure(tmp_path, Oracle(), *others))
    assert found["depth 50%", 300, "model1"][4:6] == (proportion(0, 3), None)
    assert found[ALL, 300, "model1"].estimate == proportion(0, 9)
    assert found[ALL, 160, "model1"].estimate == proportion(9, 9)
    assert found[ALL, 300, "model1"].difference == paired_proportion([0] * 9, [1] * 9)
    assert found[ALL, 300, "model2"].difference == paired_proportion([1] * 9, [1] * 9)
    asked = {(row["model"], *row["item"].values(), row["result"]["key"]) for row in rows(tmp_path)}
    assert {row[1:] for row in asked if row[0] == "oracle"} == {
        row[1:] for row in asked if row[0] == "other"
    }


def test_batches_and_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(tmp_path / "a", Oracle()).cells
    assert measure(tmp_path / "b", Oracle(), **GRID | {"batch_size": 64}).cells == whole
    monkeypatch.setattr(trie, "PREFILL_TOKENS", 64)
    oracle = Oracle()
    assert measure(tmp_path / "d", oracle).cells == whole
    assert oracle.longest == 64


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    bpe, oracle = trained_bpe(), cast(Any, Oracle())
    oracle.vocab_size, least = bpe.vocab_size, Passkey(bpe).least_length()
    own: dict[str, Any] = {"n": 2, "depths": [0.5]}
    subject = OpenCheckpoint("bpe", oracle, bpe)
    found = measure(tmp_path / "r", subject, lengths=[least], **own)
    assert cells(found)[ALL, least, "bpe"].estimate is not None
    with pytest.raises(UserError, match=naming(least, "bpe")):
        measure(tmp_path / "s", subject, lengths=[least - 1], **own)
    assert not (tmp_path / "s").exists()


def test_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    first = measure(tmp_path, Oracle()).cells
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10]) + lines[10][:-10])
    oracle = Oracle()
    assert measure(tmp_path, oracle).cells == first
    assert oracle.prompts == 8
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    more = {"lengths": [160, 300, 400], "depths": [0.0, 0.25, 0.5, 1.0], "n": 4}
    oracle, other = Oracle(), Oracle(name="other")
    measure(tmp_path, oracle, other, **more)
    assert (oracle.prompts, other.prompts) == (30, 48)
    assert len(rows(tmp_path)) == 96
    oracle = Oracle()
    assert measure(tmp_path, oracle).cells == first
    assert measure(tmp_path, oracle, **GRID | {"lengths": [160, 160], "n": 1}).results["model0"]
    assert oracle.prompts == 0


def test_insertion_points(tmp_path: Path) -> None:
    measure(tmp_path / "r", Oracle(), **INSERTED)
    found = {tuple(row["item"].values()): row["result"] for row in rows(tmp_path / "r")}
    wanted = {(200, 0), (300, 0), (300, 100), (400, 0), (400, 100), (400, 200)}
    assert {(length, place) for length, place, _ in found} == wanted
    lost = cells(measure(tmp_path / "f", Oracle(forgets=400), **INSERTED))
    shares = {at: cell.estimate for (name, at, _), cell in lost.items() if name == "100"}
    assert shares == {300: proportion(3, 3), 400: proportion(0, 3)}
    task = Passkey(ByteTokenizer())
    for (length, place, index), row in found.items():
        needle = prompts.Needle(row["key"], place / max(task.free(row["key"], length), 1))
        prompt = bytes(task.prompt_of([needle], 0, length=length).tolist())
        line = f"\nThe passkey is {row['key']}. ".encode()
        assert (len(prompt), prompt.index(line)) == (length, len(prompts.PROMPT_HEADER) + place)
        assert row["key"] == found[400, place, index]["key"]


def test_depths_of_doubled_lengths_meet(tmp_path: Path) -> None:
    """Depths that are the same position have the same key at the same token."""
    outcome = measure(tmp_path, Oracle(), lengths=[2048, 4096], depths=[0.25, 0.5, 1.0], n=3)
    found, task = keys(tmp_path), Passkey(ByteTokenizer())
    asked = {item.spec[:3]: item.spec for item, _ in outcome.results["model0"]}
    for index in range(3):
        for length, depth, filler in ((2048, 0.5, 1024), (4096, 0.25, 1024), (4096, 1.0, None)):
            needles = asked[length, depth, index].needles
            context, line = task.context(needles, 0, length=length), task.line(needles[0])
            place = bytes(context.tolist()).index(bytes(line.tolist()))
            last = len(context) - len(line)
            assert place == (last if filler is None else task.n_header + filler)
        assert found[2048, 0.5, index] == found[4096, 0.25, index]
    assert len({key for (length, *_), key in found.items() if length == 4096}) > 6
    measure(tmp_path / "seed", Oracle(), **GRID | {"seed": 1})
    assert set(keys(tmp_path / "seed").values()) != set(found.values())


def test_prompts_that_share_text_count_once(tmp_path: Path) -> None:
    """Intervals over prompts of one book count its separate stretches."""
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night; the rain fell in torrents. " * 8)
    options: dict[str, Any] = {"lengths": [200], "depths": [0, 1], "n": 8, "filler": book}
    models = Oracle(), Oracle(forgets=1, name="other")
    found = cells(measure(tmp_path / "r", *models, **options, batch_size=4))
    estimate, difference = found[ALL, 200, "model0"].estimate, found[ALL, 200, "model1"].difference
    assert estimate is not None
    assert difference is not None
    assert (estimate.n, difference.mean) == (16, -1)
    assert estimate.low < proportion(8, 8).low
    assert difference.high > paired_proportion([0] * 8, [1] * 8).high


def test_lengths_out_of_reach_have_a_reason(tmp_path: Path) -> None:
    """A length is out of reach if the prompt fits but its answer does not."""
    short = small_model("short", position=SHORT)
    # " 01234" is 6 bytes: 294 + 6 are the 300 positions that there are.
    found = cells(measure(tmp_path, short, lengths=[200, 294, 295], depths=[0.5], n=1))
    assert [found[ALL, t, "short"].estimate is None for t in (200, 294, 295)] == [0, 0, 1]
    assert "300" in str(found[ALL, 295, "short"])
    with pytest.raises(UserError, match="300"):
        measure(tmp_path / "none", short, lengths=[400], n=1)
    assert not (tmp_path / "none").exists()
