"""`longrnn eval harness` from the command line."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import CLI
from tests.texts import DATA


def test_passkey_tiny(cli: CLI, tmp_path: Path) -> None:
    options = ["--limit", "10", "--output_path", tmp_path / "out", "--log_samples"]
    options += ["--batch_size", "3"]
    result = cli("eval", "harness", "passkey-tiny", "--tasks", "longrnn_passkey", *options)
    assert result.code == 0, result.err
    assert "longrnn_passkey" in result.out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["results"]["longrnn_passkey"]["exact_match,key"] == 1.0
    assert found["config"]["batch_size"] == "3"
    # Ten prompts of 1,024 tokens would be 10,240: their common beginnings were read once.
    assert 1024 < found["config"]["tokens_computed"] < 7000
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == 10


@pytest.mark.parametrize(
    "tasks",
    [
        ["tiny_choice", "--include_path", "."],
        pytest.param(["mine.yaml"], marks=pytest.mark.slow),  # lists all lm-eval tasks
    ],
    ids=str,
)
def test_a_task_that_fails(tasks: list[str], cli: CLI, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one", "choices": ["a", "b"], "gold": 0}\n')
    task = (DATA / "tasks/choice.yaml").read_text().replace("FILE", str(rows))
    (tmp_path / "mine.yaml").write_text(task.replace("{{text}}", "{{txt}}"))
    result = cli("eval", "harness", "passkey-tiny", "--tasks", *tasks)
    assert result.code == 2
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "'txt' is undefined" in last
