"""Validation during training: what it measures, what it decides, and how it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.nn.functional import cross_entropy

from longrnn import load
from longrnn.errors import UserError
from longrnn.models import RecurrentLM
from longrnn.training import checkpoint
from longrnn.training.trainer import Trainer
from longrnn.training.validation import Best, Validation
from tests.cli.conftest import CLI, cli  # noqa: F401
from tests.tasks.corpora import text_corpus
from tests.texts import BOOK, TEXTS
from tests.training.forks import pair
from tests.training.runs import (
    assert_same_run,
    crash,
    last_checkpoint,
    metrics,
    tiny,
    train,
    write_config,
)

HELD_OUT = str(BOOK)
VALIDATED: dict[str, Any] = {
    "task": {"kind": "text", "files": TEXTS[:4]},
    "length": {"max": 64},
    "validation": {"kind": "text", "files": [HELD_OUT]},
    "eval_steps": 2,
    "eval_length": 300,
    "eval_samples": 3,
    "per_device_eval_batch_size": 2,
    "logging_steps": 3,
    "save_steps": 4,
    "max_steps": 8,
}


def test_losses_are_those_of_the_model_by_position(tmp_path: Path) -> None:
    """`eval_loss_to_N` is the mean loss between the edges, with the state carried along the row."""
    trainer = train(tiny("fitted_noise", tmp_path, **VALIDATED))
    validation = trainer.validation
    assert validation is not None
    assert validation.edges == [0, 64, 128, 256, 300]
    rows = validation.rows
    model = load(tmp_path)
    assert isinstance(model, RecurrentLM)
    with torch.no_grad():
        logits = model(rows.tokens).logits.double()
    nats = cross_entropy(logits.transpose(1, 2), rows.targets, reduction="none")
    wanted = {"eval_loss": nats.mean(), "eval_accuracy": (logits.argmax(-1) == rows.targets)}
    for start, stop in zip(validation.edges, validation.edges[1:], strict=False):
        wanted[f"eval_loss_to_{stop}"] = nats[:, start:stop].mean()
    found = [row for row in metrics(tmp_path) if "eval_loss" in row]
    assert [row["step"] for row in found] == [2, 4, 6, 8]
    for name, value in wanted.items():
        assert found[-1][name] == pytest.approx(float(value.double().mean()), rel=1e-5), name
    assert found[-1].keys() == {"step", "tokens", *wanted}


def test_a_validation_does_not_change_the_run(tmp_path: Path) -> None:
    """A run with validation has the weights and losses of one without."""
    train(tiny("fitted_noise", tmp_path / "with", **VALIDATED))
    train(tiny("fitted_noise", tmp_path / "without", **{**VALIDATED, "validation": {}}))
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("with", "without")]
    assert weights[0] == weights[1]
    rows = [row for row in metrics(tmp_path / "with") if "loss" in row]
    assert rows == metrics(tmp_path / "without")


def scripted(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the evaluations after steps 1, 2, … measure these losses."""
    whole = Validation.evaluate
    seen: list[int] = []

    def evaluate(self: Validation, objective: Any, step: int, *rest: Any) -> dict[str, float]:
        seen[:] = [step]
        return whole(self, objective, step, *rest)

    def measure(self: Validation, *_: Any) -> dict[str, float]:
        return {"eval_loss": values[seen[0] - 1]}

    monkeypatch.setattr(Validation, "evaluate", evaluate)
    monkeypatch.setattr(Validation, "_measure", measure)


BEST: dict[str, Any] = {"eval_steps": 1, "save_steps": 3, "save_total_limit": 1}
BEST |= {"load_best_model_at_end": True, "early_stopping_patience": 4, "max_steps": 20}
LOSSES = [5.0, 4.0, 4.5, 4.0, float("nan"), 4.1, 1.0, 1.0]


def test_the_best_checkpoint_is_kept_and_the_run_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `early_stopping_patience` evaluations without improvement the best model is final."""
    scripted(LOSSES, monkeypatch)
    config = tiny("fitted_noise", tmp_path, **{**VALIDATED, **BEST})
    trainer = train(config)
    assert trainer.step == 6
    assert trainer.validation is not None
    assert trainer.validation.best == Best(2, 4.0)
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["checkpoint-00000002", "checkpoint-00000006"]
    final = (tmp_path / "model.safetensors").read_bytes()
    assert final == (tmp_path / names[0] / "model.safetensors").read_bytes()
    assert final != (tmp_path / names[1] / "model.safetensors").read_bytes()
    # It has ended: a resume trains no further, and leaves the same model.
    assert train(config, resume=True).step == 6
    assert (tmp_path / "model.safetensors").read_bytes() == final


@pytest.mark.parametrize("step", [3, 4, 5])
def test_best_and_patience_survive_a_crash(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has the best checkpoint and the patience of an undisturbed one."""
    scripted(LOSSES, monkeypatch)
    straight, broken = (
        tiny("fitted_noise", tmp_path / name, **{**VALIDATED, **BEST}) for name in ("a", "b")
    )
    train(straight)
    crash(broken, step, monkeypatch)
    train(broken, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "b")] == [
        "checkpoint-00000002",
        "checkpoint-00000006",
    ]


def test_a_damaged_best_checkpoint_is_not_the_final_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final model is never taken from a damaged checkpoint."""
    scripted(LOSSES, monkeypatch)
    config = tiny("fitted_noise", tmp_path, **{**VALIDATED, **BEST})
    train(config)
    (tmp_path / "checkpoint-00000002/model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError):
        train(config, resume=True)


def test_a_resumed_run_with_validation_is_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations after a resume are those of an undisturbed run, bit for bit."""
    changes = {**VALIDATED, "load_best_model_at_end": True}
    straight, broken = (tiny("streams", tmp_path / name, **changes) for name in ("a", "b"))
    train(straight)
    crash(broken, 5, monkeypatch)
    crash(broken, 7, monkeypatch, resume=True)
    train(broken, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("environment", [{}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}])
def test_two_processes_evaluate_like_one(environment: dict[str, str], tmp_path: Path) -> None:
    """Copies and shards on two processes have the evaluations of one process."""
    changes = {**VALIDATED, "load_best_model_at_end": True, "max_steps": 4}
    train(tiny("carry", tmp_path / "one", **{**changes, "per_device_train_batch_size": 4, **PLAIN}))
    two = tiny("carry", tmp_path / "two", **{**changes, "num_processes": 2, **PLAIN})
    path = write_config(two, tmp_path / "config.yaml")
    both = pair("train", path, "--quiet", folder=tmp_path / "log", **environment)
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    one, other = (
        [row for row in metrics(tmp_path / name) if "eval_loss" in row] for name in ("one", "two")
    )
    assert [row["step"] for row in one] == [2, 4]
    for wanted, found in zip(one, other, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    content = checkpoint.read_training(last_checkpoint(tmp_path / "two"))["components"]
    assert content["validation"]["best"][0] == 4


def test_positions_are_those_in_documents(tmp_path: Path) -> None:
    """In packed rows, losses are averaged by the position in the document, which starts from zero:
    documents of at most the training length say nothing about greater lengths."""
    texts = [chr(97 + k) * 50 for k in range(20)]
    data = {"corpus": text_corpus(tmp_path / "c", texts), "packing": True}
    changes = {**VALIDATED, "validation": {"kind": "text", **data}, "max_steps": 2}
    values = metrics(train(tiny("fitted_noise", tmp_path / "run", **changes)).output_dir)[0]
    assert [name for name in values if "loss_to" in name] == ["eval_loss_to_64"]
    assert values["eval_loss_to_64"] == values["eval_loss"]


def test_a_transformer_is_not_validated_on_packed_rows(tmp_path: Path) -> None:
    """The run is refused before it starts, and not at its first evaluation."""
    data = {"corpus": text_corpus(tmp_path / "c", ["some words " * 5] * 9), "packing": True}
    llama = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 256}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    changes = {**VALIDATED, "validation": {"kind": "text", **data}, "transformer": llama}
    changes |= {"initial_state": {"kind": "zero"}, "model": None}
    with pytest.raises(UserError, match="validation.packing"):
        Trainer(tiny("fitted_noise", tmp_path / "run", **changes), quiet=True)


def test_splits_of_a_dataset_are_different_texts(tmp_path: Path) -> None:
    """A dataset may be trained and validated on, with another split each."""
    splits = [["some words to train on " * 9] * 4, ["other words " * 40]]
    tables = [datasets.Dataset.from_dict({"text": texts}) for texts in splits]
    names = ("train", "test")
    datasets.DatasetDict(dict(zip(names, tables, strict=True))).save_to_disk(tmp_path / "saved")
    data = {"kind": "text", "data": str(tmp_path / "saved")}
    changes = {**VALIDATED, "task": data, "validation": {**data, "split": "test"}, "max_steps": 2}
    train(tiny("fitted_noise", tmp_path / "run", **changes))
    changes["validation"] = {**data, "split": "train"}
    with pytest.raises(UserError, match="validation"):
        train(tiny("fitted_noise", tmp_path / "same", **changes))


PLAIN: dict[str, Any] = {"task": {"kind": "text", "files": TEXTS[:4]}, "length": {"max": 64}}
PLAIN |= {"gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": {"kind": "text", "files": TEXTS[:1]}}, ""),
        ({"eval_length": 99999}, "eval_length=99999"),
        ({"validation": {"kind": "tex", "files": [HELD_OUT]}}, "text"),
        ({"validation": {}, "early_stopping_patience": 2}, "early_stopping_patience=2"),
        ({"validation": {}, "load_best_model_at_end": True}, "evaluations"),
        ({"metric_for_best_model": "los"}, "loss"),
        (
            {"validation": {"kind": "reverse"}, "metric_for_best_model": "loss_inside"},
            "token",
        ),
    ],
)
def test_what_cannot_be_validated_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A validation that cannot be made, or is not held out, is refused before training."""
    with pytest.raises(UserError, match=message):
        Trainer(tiny("fitted_noise", tmp_path / "run", **{**VALIDATED, **changes}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_damaged_corpus_is_named(tmp_path: Path) -> None:
    """Damage is not taken for a text that is too short."""
    folder = Path(text_corpus(tmp_path / "corpus", ["some words to validate on " * 99]))
    tokens = bytearray((folder / "tokens.bin").read_bytes())
    tokens[999] ^= 1
    (folder / "tokens.bin").write_bytes(tokens)
    changes = {"validation": {"kind": "text", "corpus": str(folder)}, "eval_length": None}
    with pytest.raises(UserError, match=rf"^{folder}.tokens.bin is damaged"):
        Trainer(tiny("fitted_noise", tmp_path / "run", **VALIDATED | changes), quiet=True)


def test_held_out_sequences_are_validated_on(tmp_path: Path) -> None:
    """A task of random sequences is validated on its held-out ones."""
    spec = {"kind": "reverse", "vocab_size": 8, "held_out": 16}
    config = tiny("reverse", tmp_path, validation=spec, eval_length=8, max_steps=2)
    trainer = train(config)
    assert trainer.validation is not None
    held = trainer.task.evaluation_batch(0, 16, length=8)  # type: ignore[attr-defined]
    assert torch.equal(trainer.validation.rows.tokens, held.tokens)
    assert 0 <= metrics(tmp_path)[0]["eval_token_accuracy"] <= 1


def test_the_report_draws_the_loss_by_position(cli: CLI, tmp_path: Path) -> None:  # noqa: F811
    """`longrnn report` draws the validation loss by step and by position."""
    train(tiny("fitted_noise", tmp_path / "run", **VALIDATED))
    done = cli("report", "run", "--output", "report")
    assert done.code == 0, done.err
    names = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert {"eval_loss", "eval_loss_by_position", "eval_accuracy", "loss"} <= names
    assert not any(name.startswith("eval_loss_to") for name in names)
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
