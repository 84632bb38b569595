"""`longrnn compare` on tiny checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from longrnn import load
from longrnn.files import sha256
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.results import read_results
from tests.cli.conftest import CLI, refused
from tests.comparison.suites.small_models import llama

SUITE = "evaluations: [{kind: passkey, lengths: [180, 240], depths: [0, 1], n: 2}]"


@pytest.fixture
def suite(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(SUITE)
    return "mine.yaml"


def test_compare(cli: CLI, models: Path, suite: str, tmp_path: Path) -> None:
    """`compare` prints all models, writes a report, and a second run measures nothing again."""
    mitigated = f"{models / 'text'}+forget_more"
    command = ["compare", models / "text", mitigated, "--suite", suite, "--quiet"]
    result = cli(*command)
    assert result.code == 0, result.err
    assert result.err == ""
    for piece in ("suite mine", "passkey", "text+forget_more", "its difference from text"):
        assert piece in result.out
    assert result.out.count("0.00 [0.00, 0.49]") == 4
    assert result.out.count("+0.00 [−0.49, +0.49]") == 2
    folder = Path(result.out.splitlines()[-1]).parent
    assert folder == Path("results/compare/text--plain--forget_more--suite-mine")
    for name in ("report.html", "comparison.jsonl", "mine_passkey.png"):
        assert (tmp_path / folder / name).is_file()
    header, rows = read_results(tmp_path / folder / "mine/passkey/text.jsonl")
    assert header["evaluation"] == "passkey"
    assert len(rows) == 8
    assert cli(*command).out == result.out
    # As a shell expands --suite *.yaml.
    shutil.copy("mine.yaml", "also.yaml")
    both = cli("compare", models / "text", "--suite", "also.yaml", "mine.yaml", "--quiet")
    assert both.code == 0, both.err
    assert "suite also" in both.out
    assert "suite mine" in both.out


def test_models_of_one_folder_name(cli: CLI, models: Path, suite: str, tmp_path: Path) -> None:
    """Two checkpoints whose folders have the same name keep different names."""
    shutil.copytree(models / "text", tmp_path / "a/model")
    shutil.copytree(models / "text", tmp_path / "b/model")
    result = cli("compare", "a/model", "b/model", "--suite", suite, "--quiet")
    assert result.code == 0, result.err
    assert "a/model" in result.out
    assert "b/model" in result.out


def test_a_transformer(cli: CLI, models: Path, tmp_path: Path) -> None:
    """A transformer is compared up to its maximum length, and with `+beyond` further."""
    llama(tmp_path / "llama", positions=200)
    (tmp_path / "book.txt").write_text("".join(f"{i * 7919 % 1000} and " for i in range(400)))
    (tmp_path / "both.yaml").write_text(
        "evaluations:\n"
        "- {kind: passkey, lengths: [180, 240], depths: [0, 1], n: 2}\n"
        "- {kind: perplexity, texts: [book.txt], lengths: [64, 256], windows: 2}\n"
    )
    variants = [models / "text", "llama", "llama+beyond"]
    result = cli("compare", *variants, "--suite", "both.yaml", "--output", "out", "--quiet")
    assert result.code == 0, result.err
    cells = {
        (row["metric"], row["model"], row["at"]): row
        for row in map(json.loads, (tmp_path / "out/comparison.jsonl").read_text().splitlines())
    }
    assert len(cells) == 12
    for metric, near, far in (("passkey", 180, 240), ("perplexity, bits per byte", 64, 256)):
        assert cells[metric, "llama", near]["difference"] is not None
        assert "200" in cells[metric, "llama", far]["reason"]
        assert cells[metric, "llama", far]["estimate"] is None
        assert cells[metric, "llama+beyond", far]["difference"] is not None
    assert "at most 200" in (tmp_path / "out/report.html").read_text()


def test_a_text_that_was_calibrated_on(cli: CLI, models: Path, tmp_path: Path) -> None:
    """`compare` warns if a mitigation was calibrated on an evaluated text."""
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 20)
    known = Calibration(
        "c.yaml", load(models / "text").fingerprint(), 64, (sha256(tmp_path / "book.txt"),)
    )
    write_calibration(tmp_path / "c.yaml", [{"kind": "forget_more"}], known)
    (tmp_path / "s.yaml").write_text(
        "evaluations: [{kind: perplexity, texts: [book.txt], lengths: [64], windows: 1}]"
    )
    variants = [models / "text", f"{models / 'text'}+c.yaml"]
    result = cli("compare", *variants, "--suite", "s.yaml", "--quiet")
    assert result.code == 0, result.err
    (warning,) = result.err.splitlines()
    assert "book.txt" in warning


def test_an_unknown_task_is_refused_before_anything_is_measured(
    cli: CLI, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(
        "evaluations:\n- {kind: passkey, lengths: [180], depths: [0], n: 1}\n"
        "- {kind: harness, tasks: [longrnn_passky]}\n"
    )
    result = cli("compare", models / "text", "--suite", "s.yaml", "--output", "out", "--quiet")
    assert result.code == 2
    assert "longrnn_passkey" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--suite", "quik"], ("'quik' is neither a file", "did you mean 'quick'")),
        (["--suite", "none.yaml"], ("'none.yaml' is neither a file", "known: books, long")),
        (["--suite", "bad.yaml"], ("bad.yaml: unknown key evaluation", "'evaluations'")),
        (["--suite", "kind.yaml"], ("unknown evaluation 'passkeys'", "'passkey'")),
        (["--suite", "short.yaml"], ("length 20 is too short",)),
        (["--suite", "books.yaml"], ("no text file none.txt",)),
        (["--device", "abacus"], ("cannot be used",)),
        (["passkey-tyni"], ("no checkpoint 'passkey-tyni'", "'passkey-tiny'")),
        (["passkey-tiny+forgetmore"], ("unknown mitigation", "'forget_more'")),
    ],
)
def test_bad_input(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path, suite: str, tmp_path: Path
) -> None:
    """Bad input is refused in one sentence, and nothing is written."""
    for name, text in {
        "bad": "evaluation: []",
        "kind": SUITE.replace("passkey", "passkeys"),
        "short": SUITE.replace("180", "20"),
        "books": "evaluations: [{kind: perplexity, texts: [none.txt], lengths: [64]}]",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    if "--suite" not in options:
        options = ["--suite", suite, *options]
    refused(cli, "compare", models / "text", *options, "--quiet", says=says)


def test_results_of_another_suite(cli: CLI, models: Path, suite: str, tmp_path: Path) -> None:
    """Each suite has a results file of its own, and a suite does not count as a checkpoint."""
    command = ["compare", models / "text", "--suite", suite, "--output", "out", "--quiet"]
    assert cli(*command).code == 0
    (tmp_path / suite).write_text(SUITE.replace("n: 2", "n: 2, n_keys: 2"))
    refused(cli, *command, says=("suite",))
    refused(cli, "compare", suite, says=("checkpoints",))


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
