"""`longrnn finetune`: from a published checkpoint to a model that transformers loads."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longrnn import load, load_tokenizer
from longrnn.checkpoints.layouts import LAYOUTS
from longrnn.evaluation import perplexity
from tests.cli.conftest import CLI
from tests.hf.foreign import native
from tests.texts import DATA, trained_bpe
from tests.training.runs import last_checkpoint, metrics

DOCUMENTS, IDS = DATA / "texts", trained_bpe().vocab_size

SMALL = ["max_steps=4", "eval_steps=2", "save_steps=2", "logging_steps=1"]
SMALL += ["learning_rate=0.01", "eval_length=64", "eval_samples=1", "segments_per_step=2"]
SMALL += ["per_device_train_batch_size=2", "--length", "32", "--evaluate-to", "64"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `base` as `state-spaces/mamba2-*` has it, with a BPE tokenizer.

    Matrices in float16, the rates in float32, and an embedding with more rows than there are ids.
    """
    root = tmp_path_factory.mktemp("finetune")
    native(root / "base", ids=IDS, pad=16)
    narrow: Any = load(root / "base", dtype=torch.float16)
    LAYOUTS["native"].save(narrow, root / "base")
    trained_bpe().save(root / "base")
    return root


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(60)[None]).logits


def evaluated_cells() -> list[dict[str, Any]]:
    return json.loads(Path("run/evaluation/cells.json").read_text())["cells"]


def test_answers_are_evaluated_where_answers_are_trained(
    models: Path, cli: CLI, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{k} and {k} are", "completion": " same"} for k in range(120)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = ["max_steps=60", "task.kind=instruct", "segments_per_step=1"]
    command = ["finetune", models / "text", *SMALL, *more, "--initial-state", "zero"]
    done = cli(*command, "--data", "pairs.jsonl", "--output", "run")
    assert done.code == 0, done.err
    assert "leaves passkeys out" in caplog.text
    tuned = {cell["metric"]: cell for cell in evaluated_cells() if cell["model"] != "before"}
    assert tuned.keys() == {"answers, nats per token", "answers, exact match"}
    loss, right = (tuned[f"answers, {name}"] for name in ("nats per token", "exact match"))
    assert loss["difference"]["high"] < 0
    assert loss["difference"]["n"] == right["difference"]["n"] >= 5
    assert (right["estimate"]["mean"], right["difference"]["mean"]) == (1, 1)


def test_a_published_checkpoint_is_fine_tuned_and_converted(shelf: Path, cli: CLI) -> None:
    base = load(shelf / "base")
    assert base.vocab_size > IDS
    assert {p.dtype for p in base.parameters()} == {torch.float16, torch.float32}
    done = cli("finetune", shelf / "base", "--data", DOCUMENTS, "--output", "run", *SMALL)
    assert done.code == 0, done.err
    rows = metrics(Path("run"))
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert evaluated.keys() == {2, 4}
    assert evaluated[4] < evaluated[2]
    tuned = load("run")
    assert {p.dtype for p in tuned.parameters()} == {torch.float32}
    assert tuned.fingerprint() == load(last_checkpoint(Path("run"))).fingerprint()
    report = Path("run/evaluation/report.html").read_text()
    assert "before" in report
    assert "after" in report
    cells = [cell for cell in evaluated_cells() if cell["metric"].endswith("bits per byte")]
    loss = {(cell["model"], cell["at"]): cell["estimate"]["mean"] for cell in cells}
    assert loss.keys() == {(model, at) for model in ("before", "after") for at in (32, 64)}
    assert all(loss["after", at] < loss["before", at] for at in (32, 64))
    assert all(cell["estimate"]["n"] >= 5 and cell["estimate"]["low"] for cell in cells)
    assert cli("convert", "run", "hf", "--to", "hf").code == 0
    theirs = AutoModelForCausalLM.from_pretrained("hf")
    assert theirs.config.model_type == "mamba2"
    torch.testing.assert_close(logits(theirs), logits(tuned), atol=1e-4, rtol=1e-4)
    assert load_tokenizer("run").vocab_size == IDS == len(AutoTokenizer.from_pretrained("hf"))


def test_the_evaluation_is_resumed_and_the_configuration_repeats_the_run(
    models: Path, cli: CLI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured twice; the command that an interrupted one prints has its options."""
    command = ["finetune", models / "text", "--data", DOCUMENTS, "--output", "run", *SMALL]
    assert cli(*command, "--no-evaluate").code == 0
    assert not Path("run/evaluation").exists()
    resume = ["finetune", "--resume", "run", "--evaluate-to", "64"]

    with monkeypatch.context() as patch:
        patch.setattr(perplexity, "overlapping_losses", Mock(side_effect=KeyboardInterrupt))
        again = [*command[:5], "other", *SMALL, "--evaluate-to", "64"]
        assert "finetune --resume other --evaluate-to 64\n" in cli("--quiet", *again).err
        assert "finetune --resume run --evaluate-to 64\n" in cli(*resume).err
    done = cli(*resume)
    assert done.code == 0, done.err
    report = Path("run/evaluation/report.html").read_bytes()

    def measured(*arguments: Any) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(perplexity, "overlapping_losses", measured)
    assert cli(*resume).code == 0
    assert Path("run/evaluation/report.html").read_bytes() == report
    assert cli("train", "run/train.yaml", "output_dir=again").code == 0
    assert load("again").fingerprint() == load("run").fingerprint()
