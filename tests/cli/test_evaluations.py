"""`longrnn eval …`, `diagnose memory` and `compare` on tiny checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from longrnn.results import Row, read_rows
from tests.cli.conftest import CLI, refused
from tests.evaluation.small_models import llama

QUIET = "--quiet"


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with a text of 2,000 characters and two suites; commands run there."""
    (tmp_path / "book.txt").write_text("".join(f"{i * 7919 % 1000} and " for i in range(300)))
    one = "evaluations: [{kind: passkey, lengths: [180, 240], depths: [0, 1], n: 2}]"
    (tmp_path / "mine.yaml").write_text(one)
    (tmp_path / "also.yaml").write_text(
        f"{one[:-1]}, {{kind: perplexity, texts: [book.txt], lengths: [64, 256], windows: 2}}]"
    )
    return tmp_path


def rows(folder: Path) -> list[Row]:
    return read_rows(folder / "rows.jsonl")[0]


def cells(folder: Path) -> dict[tuple[str, str, int | None], Any]:
    found = json.loads((folder / "cells.json").read_text())["cells"]
    return {(cell["metric"], cell["model"], cell["at"]): cell for cell in found}


COMMANDS: dict[str, list[str]] = {
    "passkey": ["eval", "passkey", "{m}/text", "--lengths", "160,256", "--n", "2"],
    "inserted": ["eval", "passkey", "{m}/text", "--lengths", "200,300", "--n", "1"]
    + ["--insert-at", "0,100"],
    "perplexity": ["eval", "perplexity", "{m}/text", "--text", "book.txt", "--lengths", "64,256"],
    "overlapping": ["eval", "perplexity", "{m}/text", "--text", "book.txt", "--lengths", "256"]
    + ["--context", "64", "--stride", "32"],
    "newlines": ["eval", "perplexity", "{m}/text", "--newlines", "--lengths", "100"],
    "reverse": ["eval", "reverse", "{m}/backwards", "--n", "7"],
    "task": ["eval", "task", "{m}/backwards", "--lengths", "5,6", "--n", "3"],
    "memory": ["diagnose", "memory", "{m}/text", "--text", "book.txt", "--positions", "16,64"],
    "compare": ["compare", "{m}/text", "{m}/text+forget_more", "also.yaml"],
}
SAYS = {
    "passkey": ("depth 75%", "keys recalled", "256", "× as many"),
    "inserted": ("100", "keys recalled", "300"),
    "perplexity": ("bits per byte", "nats per token over", "64"),
    "overlapping": ("bits per byte", "1.75"),
    "newlines": ("bits per byte", "100"),
    "reverse": ("token accuracy", "exact match", "edit distance", "8"),
    "task": ("token accuracy", "5", "6"),
    "memory": ("EffRem, T = 64", "last tokens kept", "After 64 tokens"),
    "compare": ("text+forget_more", "difference from text", "+0.00 [−0.49, +0.49]"),
}
ROWS = {"passkey": 20, "inserted": 3, "perplexity": 9, "overlapping": 9, "newlines": 1,
        "reverse": 7, "task": 6, "memory": 8, "compare": 20}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_writes_and_goes_on(
    name: str, cli: CLI, models: Path, shelf: Path
) -> None:
    """A table with its notes, a page with pictures, and rows that are not measured twice."""
    command = [part.format(m=models) for part in COMMANDS[name]]
    result = cli(*command, QUIET)
    assert (result.code, result.err) == (0, "")
    for piece in SAYS[name]:
        assert piece in result.out
    written = [Path(line) for line in result.out.splitlines() if line.startswith("results/")]
    folder = written[0].parent
    kind = {"inserted": "passkey", "overlapping": "perplexity", "newlines": "perplexity"}
    assert folder.parent == Path("results") / kind.get(name, name)
    assert {path.name for path in written} >= {"cells.json", "report.html"}
    assert any(path.suffix == ".png" for path in written)
    assert {*written, folder / "rows.jsonl"} == set(folder.iterdir())
    assert len(rows(folder)) == ROWS[name]
    before = (folder / "rows.jsonl").read_bytes()
    assert cli(*command, QUIET).out == result.out
    assert (folder / "rows.jsonl").read_bytes() == before


def test_eval_and_compare_share_their_rows(
    cli: CLI, models: Path, shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One folder takes the rows of any evaluation, model and option; nothing is refused."""
    out = ["--output", "out", QUIET]
    assert cli("compare", models / "text", "mine.yaml", *out).code == 0
    before = (shelf / "out/rows.jsonl").read_bytes()
    asked = ["--lengths", "180,240", "--depths", "0,1.0", "--n", "2"]
    assert cli("eval", "passkey", models / "text", *asked, *out).code == 0
    assert (shelf / "out/rows.jsonl").read_bytes() == before
    assert cli("eval", "passkey", models / "text", *asked, "--seed", "1", *out).code == 0
    assert cli("eval", "reverse", models / "backwards", "--n", "2", *out).code == 0
    assert (shelf / "out/rows.jsonl").read_bytes().startswith(before)
    assert len(rows(shelf / "out")) == 8 + 8 + 2
    with open(shelf / "out/rows.jsonl", "r+b") as file:
        file.seek(300)
        file.write(b"#")
    warned = cli("compare", models / "text", "mine.yaml", *out)
    assert warned.code == 0
    assert "rows.jsonl, line" in caplog.text
    assert len(rows(shelf / "out")) == 18


def test_several_suites_and_names(cli: CLI, models: Path, shelf: Path) -> None:
    """As a shell expands --suite *.yaml; two folders of one name keep different names."""
    for name in ("a", "b"):
        shutil.copytree(models / "text", shelf / name / "model")
    result = cli("compare", "a/model", "b/model", "--suite", "also.yaml", "mine.yaml", QUIET)
    assert result.code == 0, result.err
    for piece in ("a/model", "b/model", "also passkey", "mine passkey"):
        assert piece in result.out


def test_a_transformer(cli: CLI, models: Path, shelf: Path) -> None:
    """A transformer is compared up to its maximum length, and with `+beyond` further."""
    llama(shelf / "llama", positions=200)
    variants = [models / "text", "llama", "llama+beyond"]
    result = cli("compare", *variants, "--suite", "also.yaml", "--output", "out", QUIET)
    assert result.code == 0, result.err
    found = cells(shelf / "out")
    columns = {"passkey, keys recalled": (180, 240), "perplexity, bits per byte": (64, 256)}
    for metric, (near, far) in columns.items():
        assert found[metric, "llama", near]["difference"] is not None
        assert found[metric, "llama", far]["estimate"] is None
        assert "200" in found[metric, "llama", far]["reason"]
        assert found[metric, "llama+beyond", far]["difference"] is not None
    assert "at most 200" in (shelf / "out/report.html").read_text()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["compare", "{m}/text", "--suite", "quik"], ("quik", "quick")),
        (["compare", "mine.yaml"], ("checkpoints",)),
        (["compare", "{m}/text", "bad.yaml"], ("longrnn_passkey",)),
        (["compare", "{m}/text", "mine.yaml", "--device", "abacus"], ("abacus",)),
        (["compare", "passkey-tyni", "mine.yaml"], ("passkey-tyni", "passkey-tiny")),
        (["eval", "perplexity", "{m}/text"], ("--text", "--newlines")),
        (["eval", "perplexity", "{m}/text", "--text", "none.txt"], ("none.txt",)),
        (["eval", "perplexity", "{m}/text", "--text", "book.txt"], ("book.txt", "64k")),
        (["eval", "perplexity", "{m}/text", "--newlines", "--stride", "9"], ("--context",)),
        (["eval", "passkey", "{m}/text", "{m}/text+forgetmore"], ("forget_more",)),
        (["diagnose", "memory", "{m}/text", "--text", "book.txt", "--positions", "1"], ("1",)),
    ],
)
def test_bad_input(
    command: list[str], says: tuple[str, ...], cli: CLI, models: Path, shelf: Path
) -> None:
    """Bad input is refused in one sentence, and nothing is written."""
    (shelf / "bad.yaml").write_text("evaluations: [{kind: harness, tasks: [longrnn_passky]}]")
    refused(cli, *(part.format(m=models) for part in command), QUIET, says=says)


@pytest.mark.parametrize("how", ["include_path", "file"])
def test_a_suite_runs_its_own_task_files_only_where_they_are_trusted(
    how: str, cli: CLI, models: Path, tmp_path: Path
) -> None:
    """A suite that names lm-eval task files, which can run Python, needs --trust-task-code."""
    pytest.importorskip("lm_eval")
    folder, ran = tmp_path / "tasks", tmp_path / "ran"
    folder.mkdir()
    (folder / "code.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n\ndef text(doc):\n    return doc['text']\n"
    )
    (folder / "rows.jsonl").write_text('{"text": "one two three"}\n')
    (folder / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\n"
        'doc_to_text: ""\ndoc_to_target: !function code.text\n'
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    options = {"include_path": f"tasks: [mine], include_path: {folder}",
               "file": f"tasks: [{folder / 'mine.yaml'}], metadata: {{a: 1}}"}  # fmt: skip
    suite = tmp_path / "own.yaml"
    suite.write_text(f"evaluations: [{{kind: harness, {options[how]}}}]")
    refused = cli("compare", models / "text", suite, "--quiet")
    assert refused.code == 2
    assert "--trust-task-code" in refused.err
    assert not ran.exists()
    trusted = cli("compare", models / "text", suite, "--trust-task-code", "--quiet")
    assert "--trust-task-code" not in trusted.err
    assert ran.exists()
