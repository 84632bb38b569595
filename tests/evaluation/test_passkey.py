"""Passkey evaluation of models with known answers."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longrnn.data import Passkey
from longrnn.data.prompts import HEADER, keys
from longrnn.errors import UserError
from longrnn.evaluation import passkey
from longrnn.evaluation.passkey import (
    evaluate,
    evenly_spaced,
    summarise,
    summarise_inserted,
)
from longrnn.evaluation.passkey_grid import Grid, Sample
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference import prefill
from longrnn.models import LanguageModel
from longrnn.results import Row, line_of, read_results
from longrnn.text import ByteTokenizer
from tests.evaluation.oracles import Oracle
from tests.refusals import naming
from tests.texts import trained_bpe

pytestmark = pytest.mark.core

CELLS: dict[str, Any] = {"lengths": [160, 300], "depths": [0.0, 0.5, 1.0], "n": 3}


def measure(*models: LanguageModel, output: Path, **changes: Any) -> list[Row]:
    subjects = [
        OpenCheckpoint(f"model{i}", model, ByteTokenizer()) for i, model in enumerate(models)
    ]
    options = {**CELLS, "batch_size": 4, **changes}
    grid = Grid(**{name: options.pop(name) for name in Grid._fields if name in options})
    return evaluate(subjects, grid, output=output, quiet=True, **options)


def cells(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(row["model"], row["length"], row["depth"], row["index"]) for row in rows]


def test_an_oracle_is_right_everywhere(tmp_path: Path) -> None:
    """A model that always recalls has an accuracy of 1 in every cell."""
    oracle = Oracle()
    rows = measure(oracle, output=tmp_path / "r.jsonl")
    wanted = [("model0", t, d, i) for t in (160, 300) for d in (0.0, 0.5, 1.0) for i in range(3)]
    assert sorted(cells(rows)) == wanted
    assert all(row["correct"] and row["said"] == row["key"] for row in rows)
    assert oracle.prompts == 18
    for estimate in summarise(rows).values():
        assert estimate.mean == 1


def test_rows_say_everything(tmp_path: Path) -> None:
    """Every row records what is needed to check it, and all keys are held out from training."""
    rows = measure(Oracle(), output=tmp_path / "r.jsonl")
    for row in rows:
        assert row.keys() == {"model", "length", "depth", "index", "key", "said", "correct"}
        assert row["key"] in keys(True)
    header, written = read_results(tmp_path / "r.jsonl")
    assert sorted(cells(written)) == sorted(cells(rows))
    assert all(row in rows for row in written)
    assert header == {
        "evaluation": "passkey", "models": {"model0": "oracle"}, "tokenizers": {"model0": "bytes"},
        "seed": 0, "version": 3,
    }  # fmt: skip
    assert len({row["key"] for row in rows}) > 7


def test_a_model_that_forgets_is_wrong_where_it_forgets(tmp_path: Path) -> None:
    """Accuracy counts the correct answers of each cell."""
    rows = measure(Oracle(forgets=300), output=tmp_path / "r.jsonl")
    scores = summarise(rows)
    assert [scores[160, depth].mean for depth in (0.0, 0.5, 1.0, None)] == [1, 1, 1, 1]
    assert [scores[300, depth].mean for depth in (0.0, 0.5, 1.0, None)] == [0, 0, 0, 0]
    assert (scores[300, 0.5].n, scores[300, None].n) == (3, 9)
    assert {row["said"] for row in rows if row["length"] == 300} == {"00000"}


def test_models_are_asked_the_same_questions(tmp_path: Path) -> None:
    """All models get the same keys."""
    rows = measure(Oracle(), Oracle(forgets=0, name="other"), output=tmp_path / "r.jsonl")
    split = passkey.by_model(rows)
    assert list(split) == ["model0", "model1"]
    asked = [
        {cell[1:]: row["key"] for cell, row in zip(cells(r), r, strict=True)}
        for r in split.values()
    ]
    assert asked[0] == asked[1]
    assert all(row["correct"] for row in split["model0"])
    assert not any(row["correct"] for row in split["model1"])


def test_the_batch_size_changes_nothing(tmp_path: Path) -> None:
    """The answers do not depend on the batch size."""
    rows = [
        measure(Oracle(), output=tmp_path / f"{size}.jsonl", batch_size=size) for size in (1, 5, 64)
    ]
    assert rows[0] == rows[1] == rows[2]


def test_long_prompts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are read in pieces with a carried state."""
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 64)
    oracle = Oracle()
    rows = measure(oracle, output=tmp_path / "r.jsonl", lengths=[256, 301])
    assert all(row["correct"] for row in rows)
    assert oracle.longest == 64


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    """Each model gets prompts of its own tokenizer."""
    bpe = trained_bpe()
    oracle = Oracle()
    oracle.vocab_size = bpe.vocab_size
    least = Passkey(bpe).least_length()
    subject = OpenCheckpoint("bpe", oracle, bpe)
    rows = evaluate([subject], Grid([least], 2, [0.5]), output=tmp_path / "r.jsonl", quiet=True)
    assert len(rows) == 2
    with pytest.raises(UserError, match=naming(least, "bpe")):
        evaluate([subject], Grid([least - 1], 2, [0.5]), output=tmp_path / "s.jsonl")
    narrow = OpenCheckpoint("narrow", Oracle(), bpe)
    with pytest.raises(UserError, match=naming(bpe.vocab_size, 256)):
        evaluate([narrow], Grid([least], 2, [0.5]), output=tmp_path / "s.jsonl")
    assert not (tmp_path / "s.jsonl").exists()


def test_a_torn_line_is_asked_again_and_nothing_else(tmp_path: Path) -> None:
    """A resumed evaluation adds missing rows and keeps the others."""
    output = tmp_path / "r.jsonl"
    whole = measure(Oracle(), output=output)
    lines = output.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:11])  # the header and ten rows
    output.write_bytes(kept + lines[11][:-10])
    oracle = Oracle()
    rows = measure(oracle, output=output)
    assert oracle.prompts == 8
    assert output.read_bytes().startswith(kept)
    assert rows == whole
    assert sorted(cells(read_results(output)[1])) == sorted(cells(whole))


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    """A finished evaluation runs no model."""
    output = tmp_path / "r.jsonl"
    rows = measure(Oracle(), output=output)
    before = output.read_bytes()
    oracle = Oracle()
    assert measure(oracle, output=output) == rows
    assert oracle.prompts == 0
    assert output.read_bytes() == before


def inserted(*models: LanguageModel, output: Path, **changes: Any) -> list[Row]:
    grid = {"lengths": [200, 300, 400], "depths": (), "insert_at": [0, 100, 200], "n": 3}
    return measure(*models, output=output, **(grid | changes))


def test_insertion_points(tmp_path: Path) -> None:
    """The key is at its insertion point, and cells without room are left out."""
    rows = inserted(Oracle(), output=tmp_path / "r.jsonl")
    wanted = {(200, 0), (300, 0), (300, 100), (400, 0), (400, 100), (400, 200)}
    assert {(row["length"], row["insert_at"]) for row in rows} == wanted
    assert all(row["correct"] and "depth" not in row for row in rows)
    header, written = read_results(tmp_path / "r.jsonl")
    assert header["grid"] == "absolute"
    assert len(rows) == len(written) == 18
    scores = summarise_inserted(inserted(Oracle(forgets=400), output=tmp_path / "f.jsonl"))
    assert {cell: score.mean for cell, score in scores.items() if cell[1] == 100} == {
        (300, 100): 1, (400, 100): 0,
    }  # fmt: skip
    # The same key at every length, behind so much filler of the one prompt.
    task = Passkey(ByteTokenizer())
    for row in rows:
        needle = task.needle_at(row["key"], row["insert_at"], length=row["length"])
        prompt = bytes(task.prompt_of([needle], 0, length=row["length"]).tolist())
        assert len(prompt) == row["length"]
        line = f"\nThe passkey is {row['key']}. ".encode()
        assert prompt.index(line) == len(HEADER) + row["insert_at"]
    keys: dict[Any, set[str]] = {(row["insert_at"], row["index"]): set() for row in rows}
    for row in rows:
        keys[row["insert_at"], row["index"]].add(row["key"])
    assert all(len(found) == 1 for found in keys.values())


def test_insertion_points_go_on(tmp_path: Path) -> None:
    """Each cell is evaluated once, and depths and insertion points do not share a file."""
    output = tmp_path / "r.jsonl"
    first = inserted(Oracle(), output=output, insert_at=[0, 100])
    oracle = Oracle()
    rows = inserted(oracle, output=output)
    assert oracle.prompts == 3
    assert [row for row in rows if row["insert_at"] != 200] == first
    with pytest.raises(UserError, match="grid"):
        measure(Oracle(), output=output)


def test_depths_of_doubled_lengths_meet(tmp_path: Path) -> None:
    """Depths that are the same position have the same key at the same token."""
    changes = {"lengths": [2048, 4096], "depths": [0.25, 0.5, 1.0]}
    rows = {(r["length"], r["depth"], r["index"]): r for r in measure(
        Oracle(), output=tmp_path / "r.jsonl", **changes)}  # fmt: skip
    task = Passkey(ByteTokenizer())
    for index in range(3):
        one, two = Sample(2048, 0.5, index), Sample(4096, 0.25, index)
        questions = [sample.question(task, 0, 1) for sample in (one, two)]
        places = [
            task.context(q.needles, 0, length=sample.length)[1].size
            for q, sample in zip(questions, (one, two), strict=True)
        ]
        assert places == [1024, 1024]
        assert rows[2048, 0.5, index]["key"] == rows[4096, 0.25, index]["key"]
        last = Sample(4096, 1.0, index).question(task, 0, 1)
        assert task.context(last.needles, 0, length=4096)[-1].size == 0
    assert len({row["key"] for (t, _, _), row in rows.items() if t == 4096}) > 6


@pytest.mark.parametrize("fraction", [0, 1, 7, 1000, 5021, 99_844])
def test_every_insertion_point_is_exact(fraction: int) -> None:
    """An insertion point is exact at every length."""
    task = Passkey(ByteTokenizer())
    needle = task.needle_at("12345", fraction, length=100_000)
    assert task.context([needle], 0, length=100_000)[1].size == fraction


@pytest.mark.parametrize("calls", [0, 1, 9, 20, 30, 60])
def test_an_interruption_loses_no_answer(tmp_path: Path, calls: int) -> None:
    """Rows are written as soon as a batch is done, and are not measured again."""
    output = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measure(Oracle(fails_after=calls), output=output)
    kept = output.read_bytes()
    done = len(kept.splitlines()) - 1
    assert done >= calls // 12
    oracle = Oracle()
    rows = measure(oracle, output=output)
    assert len(read_results(output)[1]) == len(rows) == 18
    assert oracle.prompts == 18 - done
    assert output.read_bytes().startswith(kept)
    assert rows == measure(Oracle(), output=tmp_path / "straight.jsonl")


def test_more_lengths_depths_and_prompts_add_to_the_file(tmp_path: Path) -> None:
    """A larger grid keeps the rows of a smaller one."""
    output = tmp_path / "r.jsonl"
    first = measure(Oracle(), output=output)
    oracle = Oracle()
    more = {"lengths": [160, 300, 400], "depths": [0.0, 0.25, 0.5, 1.0], "n": 4}
    rows = measure(oracle, output=output, **more)
    assert len(rows) == 48
    assert oracle.prompts == 30
    assert [row for row in rows if row in first] == first
    # Fewer cells asked: fewer rows returned, none lost.
    assert len(measure(Oracle(), output=output, n=1, lengths=[160])) == 3
    assert len(read_results(output)[1]) == 48


def test_repeated_lengths_and_depths_are_asked_once(tmp_path: Path) -> None:
    """Duplicate lengths and depths are evaluated once."""
    output = tmp_path / "r.jsonl"
    rows = measure(Oracle(), output=output, lengths=[160, 160], depths=[0.5, 0.5], n=2)
    assert len(rows) == len(read_results(output)[1]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed"),
        ({"model": Oracle(name="retrained")}, "models"),
        ({"edit": ('"passkey"', '"reverse"')}, ""),
        ({"edit": ('"bytes"', '"another"')}, ""),
    ],
)
def test_results_of_another_run_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Results of another seed, model, evaluation or tokenizer are refused and stay unchanged."""
    output = tmp_path / "r.jsonl"
    measure(Oracle(), output=output)
    if "edit" in change:
        header, rows = read_results(output)
        old, new = change["edit"]
        other = json.loads(json.dumps(header).replace(old, new, 1))
        output.write_text("".join(map(line_of, [other, *rows])))
    before = output.read_bytes()
    with pytest.raises(UserError, match=naming(message)):
        measure(change.get("model", Oracle()), output=output, seed=change.get("seed", 0))
    assert output.read_bytes() == before


def test_other_seeds_ask_for_other_keys(tmp_path: Path) -> None:
    """The seed determines the keys."""
    keys = [
        [row["key"] for row in measure(Oracle(), output=tmp_path / f"{seed}.jsonl", seed=seed)]
        for seed in (0, 1)
    ]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [300, 100]}, r"length 100 is too short .* the least is 156 tokens"),
        ({"n": 0}, "n must be from 1 to 12,494, not 0"),
        ({"batch_size": 0}, "the batch size must be from 1 to"),
        ({"depths": [0.5, 1.1]}, "depths lie between 0"),
        ({"depths": [-0.1]}, "depths lie between 0"),
        ({"depths": [math.nan]}, "depths lie between 0"),
        ({"depths": ()}, "give one of the two"),
        ({"insert_at": [10]}, "give one of the two"),
        ({"depths": (), "insert_at": [-1]}, "give 0 or more"),
        ({"depths": (), "insert_at": [10], "n_keys": 2}, "leave n_keys at 1"),
        ({"depths": (), "insert_at": [0, 1024]}, r"after 1k tokens .* needs a prompt of 1,180"),
    ],
)
def test_errors_come_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Invalid settings leave no results file."""
    output = tmp_path / "folder/r.jsonl"
    with pytest.raises(UserError, match=message):
        measure(Oracle(), output=output, **changes)
    assert not output.parent.exists()
    assert measure(Oracle(), output=output, lengths=[156])


def test_depths_are_evenly_spaced() -> None:
    """Evenly spaced depths include both ends."""
    assert evenly_spaced(1) == [0.5]
    assert evenly_spaced(2) == [0.0, 1.0]
    assert evenly_spaced(5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    with pytest.raises(UserError):
        evenly_spaced(0)


@pytest.mark.parametrize(
    "content",
    ["", "not json\n", "[1, 2]\n", "3\n", '{"evaluation": "passkey"', "\x00\x01\n", "{}\n{\n"],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    """A file that is not a results file is refused and stays unchanged."""
    output = tmp_path / "r.jsonl"
    output.write_text(content)
    with pytest.raises(UserError) as error:
        measure(Oracle(), output=output)
    assert "\n" not in str(error.value)
    assert output.read_text() == content


def test_the_file_is_one_json_object_a_line(tmp_path: Path) -> None:
    """Every line of a results file is a JSON object."""
    output = tmp_path / "r.jsonl"
    rows = measure(Oracle(), output=output)
    lines = output.read_text().splitlines()
    found = [json.loads(line) for line in lines[1:]]
    assert sorted(cells(found)) == sorted(cells(rows))
    assert max(Counter(lines).values()) == 1
