"""Evaluations under `accelerate launch`: the rows of one process, in one file.

Judged by what was written: gloo aborts about one run in ten at its very end.
"""

import json
import signal
from pathlib import Path

import pytest

from longrnn.results import StoredRow, line_of, read_rows
from tests.cli.conftest import table
from tests.launched import launched
from tests.texts import DATA
from tests.training.forks import group, run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 9 windows of 100 tokens."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"It was dark and stormy, night {i}. " for i in range(28))[:903])
    keys = "{kind: passkey, lengths: [160], depths: [0, 1], n: 3}"
    losses = f"{{kind: perplexity, texts: [{path}], lengths: [64], batch_size: 1}}"
    Path(f"{path}.yaml").write_text(f"evaluations: [{keys}, {losses}]")
    return path


def rows(folder: Path) -> list[StoredRow]:
    """The rows of a store, in an order that does not depend on who wrote them."""
    found = [row for path in folder.glob("rows*.jsonl") for row in read_rows(path)[0]]
    return sorted(found, key=lambda row: json.dumps(row, sort_keys=True))


def test_two_processes_finetune_and_evaluate(models: Path, text: Path, tmp_path: Path) -> None:
    sizes = ["--length", "32", "--evaluate-to", "32", "max_steps=1", "eval_length=32"]
    command = ["finetune", models / "text", "--data", text, *sizes, "--output", tmp_path / "run"]
    done = launched(*command, "per_device_train_batch_size=1", processes=2)
    assert (tmp_path / "run/evaluation/report.html").is_file(), done.stderr


SHORTHANDS = {"BOTH": "{m}/text {m}/text+forget_more", "LOSSES": "--text {t} --lengths"}
# By its name, a command with places for the models and a text.
COMMANDS = dict(table((DATA / "launched.txt").read_text(), SHORTHANDS))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "passkey")) for name in COMMANDS],
)
def test_two_processes_write_what_one_writes(
    name: str, models: Path, text: Path, tmp_path: Path
) -> None:
    if name == "harness":
        pytest.importorskip("wonderwords")  # of RULER
    command = [*COMMANDS[name][0].format(m=models, t=text).split(), "--output"]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run(*command, one)
    assert alone.returncode == 0, alone.stderr
    both = launched(*command, two)
    assert (two / "report.html").is_file(), both.stderr
    assert {path.name for path in two.iterdir()} - {"rows-1.jsonl"} == {
        path.name for path in one.iterdir()
    }
    assert rows(two) == rows(one)
    assert (two / "rows-1.jsonl").is_file()
    assert both.stdout.replace(str(two), str(one)) == alone.stdout


def test_damaged_results_are_replaced_by_any_process(models: Path, tmp_path: Path) -> None:
    """Both processes measure some again; what they find is in the report."""
    out = tmp_path / "out"
    command = ["eval", "passkey", models / "text", "--lengths", "160", "--depths", "0,1"]
    alone = run(*command, "--output", out)
    path = out / "rows.jsonl"
    damaged = [{**row, "result": {}} for row in read_rows(path)[0]]
    path.write_bytes(b"".join(map(line_of, damaged)))
    both = launched(*command, "--output", out)
    assert both.stdout == alone.stdout, both.stderr


def test_speed_is_measured_in_one_process(models: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("evaluations: [{kind: cost, lengths: [8, 9], decode: 1}]")
    words = ["compare", models / "text", "--suite", tmp_path / "mine.yaml"]
    both = group(*words, "--output", tmp_path / "out", folder=tmp_path)
    assert [process.end() for process in both] == [0, 0], both[0].err
    assert len(rows(tmp_path / "out")) == 2
    assert not (tmp_path / "out/rows-1.jsonl").exists()


@pytest.mark.slow
def test_rows_of_a_killed_process_are_kept(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["eval", "passkey", models / "text", "--lengths", "160,256", "--n", "40"]
    command += ["--batch-size", "2", "--output", out]
    both, part = group(*command, folder=tmp_path / "log"), out / "rows-1.jsonl"
    assert both[1].when(lambda: part.exists() and part.read_bytes().count(b"\n") > 9)
    both[1].send(signal.SIGKILL)
    assert all(process.end() != 0 for process in both)
    kept = {json.dumps(row) for row in rows(out)}
    assert 10 <= len(kept) < 400
    done = run(*command)
    assert done.returncode == 0, done.stderr
    lines = [json.dumps(row) for row in rows(out)]
    assert kept <= set(lines)
    assert len({json.dumps(row["item"]) for row in rows(out)}) == len(lines) == 2 * 5 * 40


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[], ["--chunk-select", "99"]], ids=str)
def test_two_processes_share_the_documents_of_a_task(
    chunks: list[str], models: Path, tmp_path: Path
) -> None:
    found, samples = [], []
    for how, name in ((run, "one"), (launched, "two")):
        command = ["eval", "harness", models / "text", "--tasks", "longrnn_passkey"]
        command += ["--limit", "5", "--log_samples", *chunks]
        done = how(*command, "--output_path", tmp_path / name)
        files = list((tmp_path / name).rglob("results_*.json"))
        assert len(files) == 1, done.stderr
        found.append(json.loads(files[0].read_text()))
        lines = [path.read_text().splitlines() for path in (tmp_path / name).rglob("samples_*")]
        rows = [json.loads(line) for own in lines for line in own]
        samples.append(sorted((r["target_hash"], r["doc_id"], str(r["resps"])) for r in rows))
        assert done.stdout.count("longrnn_passkey") == 1
    assert samples[0] == samples[1]
    assert len(samples[0]) == 5
    for task, scores in found[0]["results"].items():
        assert found[1]["results"][task] == pytest.approx(scores, nan_ok=True), task
    alone, both = (one["config"]["tokens_computed"] for one in found)
    assert both >= alone > 0
