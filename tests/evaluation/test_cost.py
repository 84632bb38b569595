"""What a context costs."""

from __future__ import annotations

from pathlib import Path

import torch

from longrnn import load
from longrnn import state as states
from longrnn.evaluation.options import CostOptions
from longrnn.hf.opened import OpenCheckpoint
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentLM
from longrnn.text import ByteTokenizer
from tests.evaluation.small_models import SHORT, cells, measure, small_model
from tests.hf.foreign import causal, with_bytes


def test_each_length_is_measured_once(tmp_path: Path) -> None:
    """A length out of reach has a reason; the state is that of the model under its mitigation."""
    one = small_model("one", position=SHORT)
    assert isinstance(one.model, RecurrentLM)
    windowed = one.model.under(mitigation("sliding_window(window=50)"))
    models = one, one._replace(name="windowed", model=windowed)
    evaluation = CostOptions(lengths=[64, 4096], decode=2).evaluation()
    found = cells(measure(evaluation, tmp_path / "r", *models))
    for name, model in (("one", one.model), ("windowed", windowed)):
        size = found["state or cache, bytes", 64, name].estimate.mean
        assert size == states.nbytes(model(torch.zeros(1, 64, dtype=torch.long), keep=0).state)
        assert found["prefill, tokens/s", 64, name].estimate.mean > 0
        assert found["decoding, tokens/s", 64, name].estimate.mean > 0
        assert "300" in str(found["prefill, tokens/s", 4096, name])
    content = (tmp_path / "r/rows.jsonl").read_bytes()
    assert cells(measure(evaluation, tmp_path / "r", *models)) == found
    assert (tmp_path / "r/rows.jsonl").read_bytes() == content


def test_a_transformer_beyond_its_limit(tmp_path: Path) -> None:
    """The cache of a transformer grows with the length."""
    with_bytes(causal("llama", vocab_size=256, max_position_embeddings=64), tmp_path / "llama")
    model = load(f"{tmp_path / 'llama'}+beyond")
    subject = OpenCheckpoint("llama", model, ByteTokenizer())
    found = cells(measure(CostOptions(lengths=[100], decode=3), tmp_path / "r", subject))
    # Keys and values of two layers with two heads of 8, in float32, and the position.
    size = found["state or cache, bytes", 100, "llama"].estimate.mean
    assert size == 100 * 2 * 2 * 2 * 8 * 4 + 8
