"""Costs are measured in a separate process."""

from __future__ import annotations

from pathlib import Path

import torch

from longrnn import state as states
from longrnn.comparison.cost import MIB, Job, in_a_process
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import RecurrentLM
from tests.comparison.suites.small_models import llama, small_model


def test_memory_is_that_of_the_measured_process(tmp_path: Path) -> None:
    """Memory is that of the child process alone, and the mitigation is applied."""
    folder = tmp_path / "one"
    model = small_model("one", folder=folder).model
    held = torch.ones(2**30 // 4)  # 1 GiB
    found = in_a_process(Job(f"{folder}+sliding_window(window=50)", "cpu", 1, 200, 3, 0))
    assert isinstance(found, dict), found
    assert 50 < found["peak_mib"] < held.nbytes / MIB
    assert 0 <= found["peak_over_model_mib"] < found["peak_mib"] / 2
    assert found["prefill_tokens_per_second"] > 0
    assert found["decode_tokens_per_second"] > 0
    assert isinstance(model, RecurrentLM)
    mitigated = Mitigated(model, mitigation("sliding_window(window=50)"))
    assert found["state_bytes"] == states.nbytes(mitigated.init_state(1))


def test_a_transformer_beyond_its_limit(tmp_path: Path) -> None:
    """The cache of a transformer grows with the length, and `beyond` reaches the child process."""
    llama(tmp_path / "llama", positions=64)
    found = in_a_process(Job(f"{tmp_path / 'llama'}+beyond", "cpu", 1, 100, 2, 0))
    assert isinstance(found, dict), found
    # Keys and values of one layer, 8 wide, in float32, and the position.
    assert found["state_bytes"] == 100 * 2 * 8 * 4 + 8


def test_a_failure_is_one_line() -> None:
    """A failing process gives a reason, not an error."""
    broken = in_a_process(Job("passkey-tiny", "abacus", 1, 64, 1, 0))
    assert isinstance(broken, str)
    assert broken.startswith("failed: ")
    assert "\n" not in broken
