"""Transformers in the trainer: the loss, the files, and resumed runs agree with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longrnn.errors import UserError
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.hf.training import TransformerLM, build_transformer
from longrnn.ops.rows import Rows
from longrnn.tasks import TASKS
from longrnn.text import ByteTokenizer
from longrnn.training import replay
from longrnn.training.objective import Objective
from tests.texts import TEXTS
from tests.training.runs import assert_same_run, metrics, tiny, train

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TEXT = {"kind": "text", "files": TEXTS}


def config(folder: Path, **changes: Any) -> Any:
    options = {"transformer": LLAMA, "task": TEXT, "initial_state": {"kind": "zero"}} | changes
    return tiny("passkey", folder, **options)


def test_packed_rows_are_refused() -> None:
    """A transformer would attend across documents."""
    starts = torch.ones(1, 4, dtype=torch.bool)
    model = build_transformer(LLAMA)
    with pytest.raises(UserError):
        model.hidden(torch.zeros(1, 4, dtype=torch.long), rows=Rows(is_document_start=starts))


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_that_of_transformers(tied: bool) -> None:
    """Loss and gradients equal those of transformers, with a tied head and without."""
    torch.manual_seed(0)
    model = build_transformer({**LLAMA, "tie_word_embeddings": tied})
    batch = TASKS.build(TEXT, None).sample(3, length=40, generator=torch.Generator())
    output = Objective(model)([batch], model.init_state(3))
    whole = torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1)
    expected = model.model(input_ids=whole, labels=whole).loss
    torch.testing.assert_close(output.loss, expected, atol=1e-5, rtol=1e-5)
    output.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.model(input_ids=whole, labels=whole).loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_learns_writes_and_resumes(tied: bool, tmp_path: Path) -> None:
    """The loss falls, transformers reads the checkpoint, and a resumed run is the same run."""
    changes = {"transformer": {**LLAMA, "tie_word_embeddings": tied}, "learning_rate": 0.02}
    trainer = train(config(tmp_path / "whole", **changes))
    rows = metrics(tmp_path / "whole")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    inner = trainer.model
    assert isinstance(inner, TransformerLM)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits = inner.model(input_ids=tokens).logits
        assert torch.equal(again(input_ids=tokens).logits, logits)
    tokenizer = load_tokenizer(tmp_path / "whole")
    assert tokenizer.encode("Käse: 1,024\n\n\t😀") == ByteTokenizer().encode("Käse: 1,024\n\n\t😀")

    steady = {**changes, "lr_scheduler_type": "constant", "logging_steps": 2}
    train(config(tmp_path / "a", **steady))
    train(config(tmp_path / "b", **steady, max_steps=4))
    train(config(tmp_path / "b", **steady), resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_step_that_is_not_finite_can_be_replayed(tmp_path: Path) -> None:
    """The batch of such a step is kept, and replaying it finds the same place."""
    with pytest.raises(UserError):
        train(config(tmp_path / "run", learning_rate=1e20, warmup_steps=0, max_grad_norm=1e30))
    (path,) = replay.files(tmp_path / "run")
    content, seen = replay.replay(path)
    assert content["where"] == seen.where


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"transformer": {"model_type": "lama"}}, "llama"),
        ({"transformer": {**LLAMA, "hiden_size": 3}}, "hidden_size"),
        ({"transformer": {**LLAMA, "num_attention_heads": 3}}, "llama"),
        ({"transformer": {**LLAMA, "vocab_size": 100}}, "transformer.vocab_size=256"),
        ({"transformer": {**LLAMA, "max_position_embeddings": 50}}, "max_position_embeddings=180"),
        ({"initial_state": {"kind": "carry"}}, "initial_state"),
        ({"initial_state": {"kind": "pass"}}, "initial_state"),
    ],
)
def test_invalid_settings_are_refused(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Settings that cannot be trained raise a UserError before anything is written."""
    with pytest.raises(UserError) as refusal:
        train(config(tmp_path / "run", **changes))
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_model_with_capped_logits_is_refused() -> None:
    """A model whose logits are not just hidden states times the head raises a UserError."""
    capped = {
        "model_type": "gemma2", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    with pytest.raises(UserError, match="gemma2"):
        build_transformer(capped)
