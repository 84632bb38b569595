"""A checkpoint that records a mitigation, on the command line and elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longrnn import load, mitigation
from longrnn.checkpoints.layouts import save_model
from longrnn.checkpoints.opened import open_checkpoint
from longrnn.hf.auto import LongRNNForCausalLM
from tests.cli.conftest import CLI
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import architecture, build_auto, with_bytes

WINDOW = "sliding_window(window=9)"


def save_trained(folder: Path) -> None:
    model = build_model("mamba2", dtype=torch.float32)
    model.trained_under = WINDOW
    save_model(model, folder)


def save_loaded(folder: Path) -> None:
    save_model(build_model("mamba2", dtype=torch.float32), folder.parent / "plain")
    model: Any = load(f"{folder.parent / 'plain'}+{WINDOW}")
    LongRNNForCausalLM.of(model, tokenizer="bytes").save_pretrained(folder)


def save_configured(folder: Path) -> None:
    under = {"kind": "sliding_window", "window": 9}
    auto = {"mitigation": under, "tokenizer": "bytes"}
    build_auto("mamba2", auto=auto).save_pretrained(folder)


@pytest.mark.parametrize("save", [save_trained, save_loaded, save_configured])
def test_a_checkpoint_is_the_same_mitigated_model_everywhere(
    save: Callable[[Path], None], cli: CLI, tmp_path: Path
) -> None:
    """Whoever wrote it; `none` leaves the mitigation out, and another one takes its place."""
    folder, tokens = tmp_path / "model", random_tokens(2, 30)
    save(folder)
    own: Any = build_model("mamba2", dtype=torch.float32)
    wanted = own.under(mitigation(WINDOW))
    auto: Any = AutoModelForCausalLM.from_pretrained(folder)
    opened = open_checkpoint(str(folder))
    for model in (load(folder), auto.language_model, opened.model):
        assert model.fingerprint() == wanted.fingerprint()
    assert opened.mitigation == WINDOW
    torch.testing.assert_close(auto(tokens).logits, wanted(tokens).logits)
    assert f" {WINDOW}" in cli("info", folder).out
    assert load(f"{folder}+none").fingerprint() == own.fingerprint()
    assert cli("convert", folder, "again", "--to", "ours").code == 0
    assert load("again").fingerprint() == wanted.fingerprint()
    other = own.under(mitigation("forget_more"))
    assert load(f"{folder}+forget_more").fingerprint() == other.fingerprint()


def test_info_states_what_a_window_of_attention_reads(cli: CLI, tmp_path: Path) -> None:
    folder = with_bytes(architecture("llama", vocab_size=256), tmp_path / "llama")
    said = cli("info", f"{folder}+attention_window(window=8, sinks=2)").out
    assert "up to 9 tokens" in said
    assert "the last 8 and the first 2" in said
    assert "attention" not in cli("info", folder).out
