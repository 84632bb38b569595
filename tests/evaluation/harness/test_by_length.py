"""lm-eval tasks by length, in a table with intervals, from local data."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from longrnn.checkpoints.opened import OpenCheckpoint, open_checkpoint
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.errors import UserError
from longrnn.evaluation.harness import LongRNN
from longrnn.evaluation.options import HarnessOptions
from longrnn.evaluation.run import run
from longrnn.mitigations import mitigation
from longrnn.reporting.tables import ResultTable
from tests.cli.conftest import CLI
from tests.evaluation.harness.conftest import Setting, evaluate, hf_model
from tests.evaluation.harness.test_long_context import babilong
from tests.evaluation.small_models import cells, rows
from tests.refusals import naming

RULER = Path(lm_eval.__file__).parent / "tasks/ruler"
Asked = set[tuple[Any, ...]]
NIAH = ["--gen_kwargs", "max_gen_toks=4", "--limit", "2"]


def measured(setting: Setting, folder: Path, *names: str, **options: Any) -> ResultTable:
    """Evaluate the tiny model on its tasks, with a store in a folder."""
    model = OpenCheckpoint("one", setting.model, load_tokenizer(setting.checkpoint))
    given = HarnessOptions(tasks=[*names], include_path=str(setting.tasks), **options)
    return run([model], [given.evaluation()], folder, quiet=True)[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return the prompts with choices that models are asked in this test; none is computed."""
    prompts: Asked = set()

    def loglikelihood(lm: LongRNN, requests: list[Any]) -> list[tuple[float, bool]]:
        prompts.update(request.args for request in requests)
        return [(-1.0, False)] * len(requests)

    monkeypatch.setattr(LongRNN, "loglikelihood", loglikelihood)
    return prompts


def test_few_shot_examples_are_those_of_the_document(
    setting: Setting, tmp_path: Path, asked: Asked
) -> None:
    for folder, n, size in [("a", 5, 5), ("b", 2, 1), ("b", 5, 2)]:
        given = {"n": n, "batch_size": size, "num_fewshot": 2}
        measured(setting, tmp_path / folder, "tiny_choice", **given)
    assert len(asked) == 20, "4 choices of 5 documents"


def test_stored_results_are_those_of_the_same_prompts_and_functions(
    setting: Setting, tmp_path: Path, asked: Asked
) -> None:
    """A change of these is measured; a document that the task has twice is two samples."""
    data, train = setting.tasks.parent / "rows.jsonl", tmp_path / "train.jsonl"
    text = (setting.tasks / "choice.yaml").read_text().replace(f"train: {data}", f"train: {train}")
    text += "process_docs: !function own.docs\nprocess_results: !function own.score\n"
    (tmp_path / "choice.yaml").write_text(text)
    own = "def docs(rows):\n    return rows.select([0, *range(5)])\n"
    own += "def score(row, found):\n    return {'acc': half()}\n"
    for count, word, worth in [(6, "as", 0.5), (6, "as", 0.5), (12, "AS", 0.5), (18, "AS", 0.75)]:
        train.write_text(data.read_text().replace("as", word))
        (tmp_path / "own.py").write_text(f"{own}\ndef half():\n    return {worth}\n")
        given = setting._replace(tasks=tmp_path)
        found = cells(measured(given, tmp_path / "out", "tiny_choice", num_fewshot=2))
        estimate = found["tiny_choice, acc", None, "one"].estimate
        assert (estimate.mean, estimate.n) == (pytest.approx(worth), 6)
        assert len(rows(tmp_path / "out")) == count


def test_metrics_of_all_documents_together_are_named(
    setting: Setting, tmp_path: Path, asked: Asked
) -> None:
    """A task that has no others is not measured, and has a reason beside other tasks."""
    with pytest.raises(UserError, match=naming("tiny_rolling", "byte_perplexity", "eval harness")):
        measured(setting, tmp_path / "out", "tiny_rolling")
    for name in ("choice.yaml", "rolling.yaml"):
        text = (setting.tasks / name).read_text()
        (tmp_path / name).write_text(text.replace("acc_norm", "brier_score"))
    given = setting._replace(tasks=tmp_path)
    outcome = measured(given, tmp_path / "out", "tiny_choice", "tiny_rolling")
    assert "byte_perplexity" in str(cells(outcome)["tiny_rolling", None, "one"])
    assert "tiny_choice, brier_score" in outcome.notes[0]
    outcome._replace(cells=[]).show()


def test_scores_are_those_of_the_hf_type_and_differences_are_paired(
    setting: Setting, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(setting.checkpoint)
    forgetting = setting.model.under(mitigation("forget_more(decay_scale=0.5)"))
    models = [
        OpenCheckpoint("plain", setting.model, tokenizer),
        OpenCheckpoint("forgets", forgetting, tokenizer),
    ]
    names = ["tiny_choice", "tiny_generate"]
    options = HarnessOptions(tasks=names, include_path=str(setting.tasks), batch_size=2)
    outcome = run(models, [options.evaluation()], tmp_path, quiet=True)[0]
    theirs = hf_model(str(setting.checkpoint), device="cpu", max_length=100_000, batch_size=1)
    expected = evaluate(theirs, setting.tasks, *names)["results"]
    found = cells(outcome)
    for task, metric in [(names[0], "acc"), (names[0], "acc_norm"), (names[1], "exact_match")]:
        cell = found[f"{task}, {metric}", None, "plain"]
        assert cell.estimate.mean == pytest.approx(expected[task][f"{metric},none"])
        assert cell.estimate.n == 5
        other = found[f"{task}, {metric}", None, "forgets"]
        difference = other.estimate.mean - cell.estimate.mean
        assert other.difference.mean == pytest.approx(difference)


@pytest.mark.slow
def test_lengths_from_the_command_line(cli: CLI, checkpoint: Path, tmp_path: Path) -> None:
    """Tasks that lm-eval cannot make, and lengths beyond the model, have reasons beside scores."""
    pytest.importorskip("wonderwords")
    tasks = "niah_single_1,ruler_vt,ruler_cwe"
    command = ["eval", "harness", checkpoint, "--tasks", tasks, *NIAH, "--output", tmp_path / "out"]
    first = cli(*command, "--lengths", "1k")
    assert first.code == 0, first.err
    whole = cli(*command, "--lengths", "1k,9k")
    assert whole.code == 0, whole.err
    rows = (tmp_path / "out/rows.jsonl").read_text().splitlines()
    assert sum("niah_single_1" in row for row in rows) == 2  # not measured again
    assert not any("ruler" in row for row in rows)
    written = json.loads((tmp_path / "out/cells.json").read_text())["cells"]
    reasons = {(cell["metric"], cell["at"]): cell["reason"] or "" for cell in written}
    assert reasons["niah_single_1", 1024] == ""
    assert "8,192" in reasons["niah_single_1", 9216]
    assert "no prompt fits" in reasons["ruler_vt", 1024]
    assert "no answer" in reasons["ruler_cwe", 1024]
    command[command.index(tasks)] = "ruler_cwe"
    enough = cli(*command, "--lengths", "3k", "--output", tmp_path / "enough")
    assert enough.code == 0, enough.err


@pytest.mark.slow
def test_documents_and_answers_of_ruler_are_those_of_lm_eval(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The first documents of a length are the ones that lm-eval makes when it makes 500."""
    pytest.importorskip("wonderwords")
    more = {"max_gen_toks": 8}
    options = HarnessOptions(tasks=["niah_single_1"], lengths=[1024], n=2, gen_kwargs=more)
    model = open_checkpoint(str(checkpoint))
    outcome = run([model], [options.evaluation()], tmp_path, quiet=True)[0]
    theirs = evaluate(
        hf_model(str(checkpoint), device="cpu", batch_size=1), RULER, "niah_single_1",
        metadata={"max_seq_lengths": [1024], "tokenizer": str(checkpoint)}, limit=2,
        gen_kwargs="max_gen_toks=8",
    )["samples"]["niah_single_1"]  # fmt: skip
    for (item, result), sample in zip(outcome.results[model.name], theirs, strict=True):
        assert item.spec.task.eval_docs[item.spec.number] == sample["doc"]
        assert result["said"] == sample["filtered_resps"][0]


def test_data_of_a_folder(cli: CLI, checkpoint: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    command = ["eval", "harness", checkpoint, "--lengths", "1k", "--data", data, *NIAH]
    command += ["--tasks", "babilong_qa1", "--output", tmp_path / "out"]
    refused = cli(*command)
    assert refused.code == 2
    assert "https://huggingface.co/datasets/RMT-team/babilong-1k-samples" in refused.err
    babilong(data / "RMT-team/babilong-1k-samples")
    done = cli(*command)
    assert done.code == 0, done.err
    written: list[dict[str, Any]] = json.loads((tmp_path / "out/cells.json").read_text())["cells"]
    assert {cell["metric"] for cell in written} == {"babilong_qa1, acc"}
    assert all(cell["at"] == 1024 and cell["estimate"]["n"] == 2 for cell in written)
