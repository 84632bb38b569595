"""lm-eval's long-context suites read local folders and give the answers of lm-eval's `hf` type."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
from longrnn.evaluation.harness import run
from longrnn.evaluation.harness.resources import task_resources
from longrnn.hf.tokenizer import byte_level
from tests.evaluation.harness.conftest import hf_model
from tests.hf.foreign import causal

LM_EVAL = importlib.util.find_spec("lm_eval")
assert LM_EVAL is not None
assert LM_EVAL.origin is not None
TASKS = Path(LM_EVAL.origin).parent / "tasks"
STORY = "Mary moved to the garden. It was a long day. John went to the office. " * 6


def data_set(folder: Path, configs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Write a data set as on the Hub: a README.md with configurations, splits as JSON Lines."""
    folder.mkdir(parents=True)
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            name = f"{config}-{split}.jsonl"
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
            lines += [f"  - split: {split}", f"    path: {name}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows of each data set, of which all share their context."""
    root = tmp_path_factory.mktemp("data")
    questions = [f"Where is {name}?" for name in ("Mary", "John", "Ann")]
    babi = [{"input": STORY, "question": q, "target": "garden"} for q in questions]
    data_set(root / "RMT-team/babilong-1k-samples", {"1k": {"qa1": babi}})
    book = [
        {"id": i, "context": STORY, "input": q, "answer": ["garden"], "options": []}
        for i, q in enumerate(questions)
    ]
    data_set(root / "xinrongzhang2022/InfiniteBench", {"default": {"passkey": book}})
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    causal("llama", vocab_size=256, max_position_embeddings=8192).save_pretrained(folder)
    tokenizer = byte_level()
    # The `hf` type decodes EOS; this character stands for byte 0, which no text here has.
    tokenizer.tokenizer.eos_token = tokenizer.tokenizer.convert_ids_to_tokens(0)
    tokenizer.save(folder)
    return folder


# Folder of the suite, task and metadata.
SUITES = [
    ("babilong", "babilong_qa1", {"max_seq_lengths": "1k"}),
    ("infinitebench", "infinitebench_passkey", {}),
]


def answers(output: Path) -> list[Any]:
    (file,) = output.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]


def recorded(output: Path) -> dict[str, Any]:
    (file,) = output.rglob("results_*.json")
    return json.loads(file.read_text())["config"]


@pytest.mark.parametrize(("suite", "task", "metadata"), SUITES)
def test_answers_are_those_of_the_hf_type_with_fewer_tokens(
    suite: str, task: str, metadata: dict[str, Any], data: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The `hf` type reads every prompt as a whole; shared contexts are read once here."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments = ["--tasks", task, "--include_path", str(TASKS / suite), "--limit", "3"]
    arguments += ["--metadata", json.dumps(metadata), "--gen_kwargs", "max_gen_toks=4"]
    arguments += ["--output_path", str(tmp_path), "--log_samples"]
    run(
        str(checkpoint),
        arguments,
        {"quiet": True, "device": "cpu"},
        datasets=data,
        trust_task_code=True,
    )
    found = recorded(tmp_path)
    assert found["tokens_computed"] < 0.6 * found["tokens_requested"]
    whole = {**metadata, "tokenizer": str(checkpoint)}
    manager = TaskManager(include_path=str(TASKS / suite), include_defaults=False, metadata=whole)
    evaluate: Any = simple_evaluate
    with task_resources(data):
        theirs = evaluate(
            model=hf_model(str(checkpoint), device="cpu", batch_size=1),
            tasks=[task], task_manager=manager, metadata=whole, limit=3,
            gen_kwargs="max_gen_toks=4", bootstrap_iters=0,
        )  # fmt: skip
    samples = sorted(theirs["samples"][task], key=lambda row: row["doc_id"])
    assert answers(tmp_path) == [row["resps"] for row in samples]
    assert len(samples) == 3


def test_calls_are_restored_and_the_folder_must_exist(tmp_path: Path) -> None:
    import datasets
    from transformers import AutoTokenizer

    before = datasets.load_dataset, AutoTokenizer.from_pretrained
    with task_resources(tmp_path):
        assert datasets.load_dataset is not before[0]
    assert (datasets.load_dataset, AutoTokenizer.from_pretrained) == before
    with (
        pytest.raises(UserError, match="--datasets"),
        task_resources("missing"),
    ):
        pass


def test_a_tokenizer_that_asks_for_remote_code_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local checkpoints are opened as longrnn opens them, others without their code."""
    from transformers import AutoTokenizer

    asked: list[dict[str, Any]] = []

    def from_pretrained(name: str, **options: Any) -> str:
        asked.append(options)
        return name

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with task_resources():
        own: Any = AutoTokenizer.from_pretrained("passkey-tiny", trust_remote_code=True)
        assert own("ab").input_ids == [97, 98]
        assert AutoTokenizer.from_pretrained("some/model", trust_remote_code=True) == "some/model"
    assert asked == [{"trust_remote_code": False}]
