"""Costs are measured in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import state as states
from longrnn.evaluation.cost import MIB, Cost, in_a_process
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import RecurrentLM
from tests.evaluation.small_models import SHORT, cells, measure, small_model
from tests.hf.foreign import causal, with_bytes


def job(source: str, length: int) -> dict[str, Any]:
    """Return a measurement on one thread of the CPU."""
    about = {"device": "cpu", "threads": 1, "decode": 3, "seed": 0}
    return {"source": source, "length": length, **about}


def test_memory_is_that_of_the_measured_process(tmp_path: Path) -> None:
    """Memory is that of the child process alone, and the mitigation is applied."""
    folder = tmp_path / "one"
    model = small_model("one", folder=folder).model
    held = torch.ones(2**30 // 4)  # 1 GiB
    found = in_a_process(job(f"{folder}+sliding_window(window=50)", 200))
    assert 50 < found["peak"] < held.nbytes / MIB
    assert found["prefill"] > 0
    assert found["decode"] > 0
    assert isinstance(model, RecurrentLM)
    mitigated = Mitigated(model, mitigation("sliding_window(window=50)"))
    read = mitigated(torch.zeros(1, 200, dtype=torch.long), keep=0).state
    assert found["state_bytes"] == states.nbytes(read)


def test_each_length_is_measured_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A length out of reach has a reason; a failed measurement is named, and not recorded."""
    one = small_model("one", folder=tmp_path / "one", position=SHORT)
    gone = one._replace(name="gone", source=str(tmp_path / "gone"))
    evaluation = Cost(lengths=[64, 4096], decode=2)
    found = cells(measure(evaluation, tmp_path / "r", one))
    size = found["state or cache, bytes", 64, "one"].estimate
    assert size is not None
    assert size.mean == states.nbytes(one.model.init_state(1))
    assert "300" in str(found["prefill, tokens/s", 4096, "one"])
    content = (tmp_path / "r/rows.jsonl").read_bytes()
    assert cells(measure(evaluation, tmp_path / "r", one)) == found
    assert (tmp_path / "r/rows.jsonl").read_bytes() == content
    failed = cells(measure(evaluation, tmp_path / "s", gone))
    assert list(failed) == [("prefill, tokens/s", 4096, "gone")]
    assert "gone at 64 tokens" in caplog.text
    assert not (tmp_path / "s/rows.jsonl").exists()


def test_a_transformer_beyond_its_limit(tmp_path: Path) -> None:
    """The cache of a transformer grows with the length, and `beyond` reaches the child process."""
    with_bytes(causal("llama", vocab_size=256, max_position_embeddings=64), tmp_path / "llama")
    found = in_a_process(job(f"{tmp_path / 'llama'}+beyond", 100))
    # Keys and values of two layers with two heads of 8, in float32, and the position.
    assert found["state_bytes"] == 100 * 2 * 2 * 2 * 8 * 4 + 8
