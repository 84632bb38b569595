"""Under mixed_precision=bf16 products are bfloat16, and what a run remembers is float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longrnn.ops.ssd import ScanInputs, select

from longrnn.cells import Mamba2
from longrnn.errors import UserError
from longrnn.models import RecurrentLM
from longrnn.state import leaves
from longrnn.training.trainer import Trainer
from tests.training.runs import tiny


def test_weights_states_and_decays_stay_float32(tmp_path: Path) -> None:
    """So do the moments of the optimizer, the gradients, and the state that a row carries."""
    config = tiny("carry", tmp_path / "run", mixed_precision="bf16", max_steps=2)
    trainer = Trainer(config, quiet=True)
    seen: dict[str, set[torch.dtype]] = {}

    def watched(mixer: Mamba2) -> None:
        mixer.backend = "chunked"  # another one may compute more than the recurrence in one call
        scan = select(mixer.backend)

        def ssd(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for name, tensor in (*inputs._asdict().items(), ("state", state)):
                seen.setdefault(name, set()).add(tensor.dtype)
            return scan(inputs, state)

        mixer.ssd = ssd

    model = trainer.model
    assert isinstance(model, RecurrentLM)
    for mixer in model.cells:
        assert isinstance(mixer, Mamba2)
        watched(mixer)
    optimizer = trainer.optimizer
    trained = trainer.train()
    wide, narrow = {torch.float32}, {torch.bfloat16}
    assert seen["log_decay"] == seen["state"] == wide
    assert seen["B"] == seen["C"] == narrow  # the projections did run in bfloat16
    assert {parameter.dtype for parameter in trained.parameters()} == wide
    moments = [value for entries in optimizer.state.values() for value in entries.values()]
    assert {moment.dtype for moment in moments if moment.ndim} == wide
    carried = trainer.starts.before(trainer.source.segments(2, 0)[0], 2, 0)
    assert {leaf.dtype for _, leaf in leaves(carried.layers)} == wide


def test_another_precision_in_the_same_process_is_refused(tmp_path: Path) -> None:
    """accelerate has one precision per process, as a notebook with two runs finds out."""
    Trainer(tiny("carry", tmp_path / "one"), quiet=True).train()
    with pytest.raises(UserError, match="accelerate"):
        Trainer(tiny("carry", tmp_path / "two", mixed_precision="bf16"), quiet=True)
    assert not (tmp_path / "two").exists()
