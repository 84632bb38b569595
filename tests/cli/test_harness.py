"""`longrnn eval harness` from the command line, with the bundled tasks."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CLI

SHORT = json.dumps({"max_seq_lengths": [1024], "n": 10})
LM_EVAL = "longrnn.evaluation.harness"
TRUST = "--trust-task-code"


def test_passkey_tiny(cli: CLI, tmp_path: Path) -> None:
    """lm-eval evaluates passkey-tiny on passkeys, and writes its results and samples."""
    options = ["--metadata", SHORT, "--output_path", tmp_path / "out", "--log_samples", "--quiet"]
    result = cli("eval", "harness", "passkey-tiny", "--tasks", "longrnn_passkey", *options)
    assert result.code == 0, result.err
    assert "longrnn_passkey" in result.out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["results"]["longrnn_passkey"]["accuracy,none"] == 1.0
    assert found["results"]["longrnn_passkey"]["1024,none"] == 1.0
    # Ten prompts of 1,024 tokens would be 10,240: their common beginnings were read once.
    assert 1024 < found["config"]["tokens_computed"] < 7000
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == 10


def test_own_text_under_a_mitigation(cli: CLI, models: Path, tmp_path: Path) -> None:
    """The filler may be a text of the user, and generation options are those of lm-eval."""
    (tmp_path / "book.txt").write_text("Once upon a time. " * 200)
    metadata = {"text": str(tmp_path / "book.txt"), "n": 1, "max_seq_lengths": [1500]}
    checkpoint = f"{models / 'text'}+forget_more(decay_scale=0.9)"
    options = ["--metadata", json.dumps(metadata), "--gen_kwargs", "max_gen_toks=3", "--quiet"]
    result = cli("eval", "harness", checkpoint, "--tasks", "longrnn_passkey", *options)
    assert result.code == 0, result.err
    assert "1500" in result.out


def test_own_task(cli: CLI, models: Path, tmp_path: Path) -> None:
    """A task of the user runs by --include_path, once its code is trusted."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n')
    (tmp_path / "mine" / "task.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: "
        f"{tmp_path / 'rows.jsonl'}}}}}\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list: [{metric: bits_per_byte}]\n'
    )
    options = ["--tasks", "mine", "--include_path", tmp_path / "mine", "--quiet"]
    result = cli("eval", "harness", models / "text", *options)
    assert result.code == 2
    assert "can run any Python code" in result.err
    result = cli("eval", "harness", models / "text", *options, TRUST)
    assert result.code == 0, result.err
    assert "bits_per_byte" in result.out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("doc_to_text: '{{txt}}'", "'txt' is undefined"),
        ("num_fewshot: 3", "Sample larger than population"),
        ("dataset_kwargs: {data_files: {test: no.jsonl}}", "no.jsonl"),
    ],
)
def test_a_task_that_fails(cli: CLI, tmp_path: Path, line: str, message: str) -> None:
    """A mistake in a task file is reported in one sentence, without a traceback of lm-eval."""
    (tmp_path / "rows.jsonl").write_text('{"text": "one", "choices": ["a", "b"], "gold": 0}\n')
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": f"{{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}",
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": "[{metric: acc}]",
    }
    name, _, value = line.partition(": ")
    task[name] = value
    (tmp_path / "mine.yaml").write_text("".join(f"{k}: {v}\n" for k, v in task.items()))
    result = cli("eval", "harness", "passkey-tiny", "--tasks", "mine.yaml", TRUST, "--quiet")
    assert result.code == 2
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_without_lm_eval(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lm-eval, the message names the package to install."""
    for name in [name for name in sys.modules if name.startswith(LM_EVAL)]:
        monkeypatch.delitem(sys.modules, name)
    import_before = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_before(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    result = cli("eval", "harness", "passkey-tiny", "--tasks", "longrnn_passkey")
    assert result.code == 2
    assert "pip install lm-eval" in result.err
