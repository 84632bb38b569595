"""Neither autocast nor TF32 rounds what a recurrence remembers, on any device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.ops import precision
from longrnn.ops.precision import own_precision
from longrnn.ops.repeat import repeated
from longrnn.ops.scan import SCAN
from longrnn.ops.scan.inputs import ScanInputs
from tests.backends.test_operations import inputs_from, inputs_of, results, tensors_of, within
from tests.contracts.builders import D_MODEL, GPU, assert_near, build_mixer


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_cells_of_cudnn_refuse_tf32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 keeps 11 bits of a float32 factor. A call on a CPU changes no setting."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    mixer = build_mixer({"kind": kind}, torch.float32)
    x = torch.zeros(2, 3, D_MODEL + 2)
    mixer(x, mixer.init_state(2))
    assert torch.backends.cudnn.allow_tf32
    mixer.to(GPU)
    mixer(x.to(GPU), mixer.init_state(2))
    assert not torch.backends.cudnn.allow_tf32


def test_products_of_a_recurrence_refuse_tf32() -> None:
    """On a GPU, where a program has chosen it; its choice holds again afterwards."""
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        chosen = getattr(precision.CUBLAS, precision.TF32)
        for like, expected in ((torch.ones(1), chosen), (on_gpu, precision.EXACT)):
            with own_precision(like):
                assert getattr(precision.CUBLAS, precision.TF32) == expected
            assert getattr(precision.CUBLAS, precision.TF32) == chosen != precision.EXACT
    finally:
        torch.set_float32_matmul_precision(before)


def plain(inputs: ScanInputs, state: Tensor, backend: str) -> tuple[Tensor, Any]:
    return SCAN(backend, inputs, state)


def limited(inputs: ScanInputs, state: Tensor, backend: str) -> tuple[Tensor, Any]:
    assert SCAN.limited is not None
    limit = torch.full((4,), 3.0, dtype=torch.float64, device=state.device)
    return SCAN.limited(backend, inputs, state, limit)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", ["torch", "auto"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("run", [plain, limited, within])
def test_autocast_does_not_round_a_recurrence(
    run: Any, gradients: bool, name: str, device: str
) -> None:
    """Values and gradients of scans, limits and windows are those of float32."""
    drawn, start = inputs_of((2, 70, 4, 8, 2, 16), torch.float64)

    def outcome(dtype: torch.dtype, where: str, name: str) -> list[Tensor]:
        given = [one.to(where, dtype) for one in (*tensors_of(drawn), start)]

        def call(*tensors: Tensor) -> list[Tensor]:
            with torch.autocast(where, torch.bfloat16, enabled=dtype == torch.float32):
                return [run(inputs_from(*tensors[:5]), tensors[5], name)[0]]

        return results(call, *given, gradients=gradients)

    wanted = outcome(torch.float64, "cpu", "torch")
    for ours, exact in zip(outcome(torch.float32, device, name), wanted, strict=True):
        assert ours.dtype == torch.float32
        assert_near(ours.cpu(), exact, 2e-5)


def test_a_million_passes_in_float32() -> None:
    """Of inputs that add 1e-3, with a decay below the rounding of 1 − a."""
    before, decay = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), -1e-9)
    found = repeated(before, before + 1e-3, decay, torch.tensor([10**6]))
    assert float(found) == pytest.approx(1 + 1e3, rel=1e-3)
