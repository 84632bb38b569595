"""What keeps a recurrence at its own precision, on devices with and without autocast."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longrnn.ops import precision
from longrnn.ops.norm import rms_norm
from longrnn.ops.precision import autocasts, own_precision
from longrnn.ops.rows import Rows
from tests.contracts.builders import D_MODEL, build_mixer, generator
from tests.devices import GPU


@pytest.fixture
def tf32() -> Iterator[None]:
    """The default of torch, which is restored."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_cells_of_cudnn_refuse_tf32(kind: str, packed: bool) -> None:
    """TF32 keeps 11 bits of a float32 factor. A call on a CPU changes no setting."""
    mixer = build_mixer({"kind": kind}, torch.float32)
    x = torch.zeros(2, 3, D_MODEL + 2)
    mixer(x, mixer.init_state(2))
    assert torch.backends.cudnn.allow_tf32
    mixer.to(GPU)
    rows = None
    if packed:
        starts = torch.tensor([[False, True, False], [False] * 3])
        rows = Rows(torch.tensor([[True] * 3, [True, True, False]]), starts)
    try:
        mixer(x.to(GPU), mixer.init_state(2), None, rows)
    except (RuntimeError, NotImplementedError):
        assert packed  # sizes of documents are read back, after the setting
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "rnn"), reason="torch has one setting")
@pytest.mark.usefixtures("tf32")
def test_cells_of_cudnn_refuse_tf32_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a program has chosen it for all products, and its own settings can be read."""
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    mixer = build_mixer({"kind": "gru"}, torch.float32).to(GPU)
    mixer(torch.zeros(2, 3, D_MODEL + 2, device=GPU), mixer.init_state(2))
    assert torch.backends.cudnn.rnn.fp32_precision == "ieee"  # type: ignore[attr-defined]
    assert not torch.backends.cudnn.allow_tf32


@pytest.fixture
def matmul_settings() -> Iterator[None]:
    """The settings of torch for products of float32 matrices, which are restored."""
    before = torch.get_float32_matmul_precision()
    own, general = (
        getattr(one, "fp32_precision", None) for one in (precision.CUBLAS, torch.backends)
    )
    yield
    torch.set_float32_matmul_precision(before)
    if own is not None:
        torch.backends.fp32_precision = general  # type: ignore[attr-defined]
        precision.CUBLAS.fp32_precision = own


@pytest.mark.usefixtures("matmul_settings")
@pytest.mark.parametrize("everything", [False, True])
def test_products_of_a_recurrence_refuse_tf32(everything: bool) -> None:
    """On a GPU, also where a program has chosen it; its choice holds again afterwards."""
    if everything and precision.TF32 == "allow_tf32":
        pytest.skip("torch has no setting for everything")
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    if everything:
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        precision.CUBLAS.fp32_precision = "none"
    else:
        torch.set_float32_matmul_precision("high")
    chosen = getattr(precision.CUBLAS, precision.TF32)
    assert chosen not in (precision.EXACT, "none")
    with own_precision(torch.ones(1)):
        assert getattr(precision.CUBLAS, precision.TF32) == chosen
    with own_precision(on_gpu):
        assert getattr(precision.CUBLAS, precision.TF32) == precision.EXACT
        with own_precision(on_gpu):
            pass
        assert getattr(precision.CUBLAS, precision.TF32) == precision.EXACT
    assert getattr(precision.CUBLAS, precision.TF32) == chosen


def test_a_device_without_autocast_has_none() -> None:
    """The meta device is one; asking torch about it raises."""
    assert not autocasts(torch.empty(1, device=GPU))
    with own_precision(torch.empty(1, device=GPU)):
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocasts(torch.empty(1))
        with own_precision(torch.empty(1)):
            assert not autocasts(torch.empty(1))


def test_gradients_of_norms_have_the_same_bits_under_autocast() -> None:
    """Also where the backward pass runs inside the context."""
    x, weight = (torch.randn(s, generator=generator(0)).requires_grad_() for s in ((2, 5, 8), (8,)))

    def gradients(*, cast: bool) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            return torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), [x, weight])

    for ours, theirs in zip(gradients(cast=True), gradients(cast=False), strict=True):
        assert torch.equal(ours, theirs)
