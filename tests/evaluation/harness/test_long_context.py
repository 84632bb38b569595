"""lm-eval's long-context tasks read local folders and give the answers of lm-eval's `hf` type."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from longrnn.checkpoints.tokenizer import own_tokenizers
from longrnn.evaluation.harness import run
from tests.evaluation.harness.conftest import evaluate, hf_model
from tests.evaluation.harness.test_lm import responses

BABILONG = Path(lm_eval.__file__).parent / "tasks/babilong"
STORY = "Mary moved to the garden. It was a long day. John went to the office. " * 6


def babilong(folder: Path) -> None:
    """Write a data set as on the Hub: three questions about one text."""
    folder.mkdir(parents=True)
    rows = [
        {"input": STORY, "question": f"Where is {name}?", "target": "garden"}
        for name in ("Mary", "John", "Ann")
    ]
    (folder / "qa1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: 1k\n  data_files:\n  - split: qa1\n    path: qa1.jsonl\n"
        "---\n"
    )


def test_answers_are_those_of_the_hf_type_with_fewer_tokens(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share a context read it once; a data set is read from a folder."""
    babilong(tmp_path / "data/RMT-team/babilong-1k-samples")
    monkeypatch.chdir(tmp_path)
    metadata = {"max_seq_lengths": "1k", "tokenizer": str(checkpoint)}
    model = json.dumps({"pretrained": str(checkpoint), "quiet": True})
    arguments = ["--model", "longrnn", "--model_args", model, "--device", "cpu"]
    arguments += ["--tasks", "babilong_qa1", "--include_path", str(BABILONG), "--limit", "3"]
    arguments += ["--metadata", json.dumps(metadata), "--gen_kwargs", "max_gen_toks=4"]
    run([*arguments, "--output_path", "out", "--log_samples"], Path("data"))
    (file,) = Path("out").rglob("results_*.json")
    config = json.loads(file.read_text())["config"]
    assert config["tokens_computed"] < 0.6 * config["tokens_requested"]
    monkeypatch.chdir("data")
    theirs = evaluate(
        hf_model(str(checkpoint), device="cpu", batch_size=1), BABILONG, "babilong_qa1",
        metadata=metadata, limit=3, gen_kwargs="max_gen_toks=4",
    )  # fmt: skip
    (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
    ours = {"samples": {"babilong_qa1": map(json.loads, file.read_text().splitlines())}}
    found = responses(ours, "babilong_qa1")
    assert found == responses(theirs, "babilong_qa1")
    assert len(found) == 3


def test_a_tokenizer_that_asks_for_remote_code_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local checkpoints are opened as longrnn opens them, others without their code."""
    from transformers import AutoTokenizer

    asked: list[dict[str, Any]] = []

    def from_pretrained(name: str, **options: Any) -> str:
        asked.append(options)
        return name

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with own_tokenizers():
        own: Any = AutoTokenizer.from_pretrained("passkey-tiny", trust_remote_code=True)
        assert own("ab").input_ids == [97, 98]
        assert AutoTokenizer.from_pretrained("some/model", trust_remote_code=True) == "some/model"
    assert asked == [{"trust_remote_code": False}]
    assert AutoTokenizer.from_pretrained is from_pretrained
