"""What a context costs."""

from pathlib import Path

import torch

from longrnn import state as states
from longrnn.evaluation.options import CostOptions
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentLM
from tests.evaluation.small_models import SHORT, cells, measure, small_model


def test_each_length_is_measured_once(tmp_path: Path) -> None:
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
