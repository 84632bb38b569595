"""The convolution and the gated norm of a Mamba-2 in C++ against torch, and what a scan copies."""

from __future__ import annotations

import pytest
import torch
from longrnn.ops.native import parts
from longrnn.ops.native.scan import readable_tokens, scan
from torch import Tensor

from longrnn.cells.mamba2 import Mamba2
from longrnn.mitigations.forget_more import ForgetMore
from longrnn.ops import native
from longrnn.ops.conv import causal_conv
from longrnn.ops.norm import gated_rms_norm
from tests.contracts.builders import assert_near, build_mixer, generator
from tests.ops.test_native import needs_kernels

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}
HEADS, WIDTH = 3, 7  # channels that do not fill whole vectors
pytestmark = needs_kernels


def draw(rows: int, time: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """z, the input of the convolution, and its state: the first two are parts of one tensor."""
    d = HEADS * WIDTH
    projected = torch.randn(rows, time, 3 * d + 5, generator=generator(time), dtype=torch.float64)
    before = torch.randn(rows, 3, 2 * d, generator=generator(1), dtype=torch.float64)
    z, x, _ = projected.to(dtype).split([d, 2 * d, 5], dim=-1)
    return z, x, before.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("time", [1, 2, 3, 70])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_equals_that_of_torch(
    dtype: torch.dtype, time: int, has_bias: bool
) -> None:
    _, x, before = draw(2, time, dtype)
    weight = torch.randn(x.shape[2], 4, generator=generator(2)).to(dtype)
    bias = torch.randn(x.shape[2], generator=generator(3)).to(dtype) if has_bias else None
    found = parts.convolution(x, weight, bias, before)
    assert found is not None
    y, after = causal_conv(x, weight, bias, before, activation=True)
    assert_near(found[0], y, TOLERANCES[dtype])
    assert torch.equal(found[1], after)
    assert found[0].dtype == dtype


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("groups", [1, HEADS])
def test_the_gated_norm_equals_that_of_torch(dtype: torch.dtype, rows: int, groups: int) -> None:
    z, mixed, _ = draw(rows, 9, dtype)
    x = mixed[..., : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH))
    wide = torch.promote_types(dtype, torch.float32)
    y = torch.randn(z.shape, generator=generator(4), dtype=torch.float64).to(wide)
    D, weight = (
        torch.randn(HEADS, generator=generator(5)).to(wide),
        torch.rand(z.shape[2]).to(dtype),
    )
    found = parts.gated_norm(y, z, x, D, weight, 1e-5, groups)
    assert found is not None
    assert found.dtype == dtype
    wanted = gated_rms_norm(y, z, weight, 1e-5, groups, skip=(x, D))
    assert_near(found, wanted, TOLERANCES[dtype])


def test_calls_with_gradients_are_left_to_torch() -> None:
    z, x, before = draw(1, 9, torch.float32)
    weight = torch.ones(x.shape[2], 4, requires_grad=True)
    assert parts.convolution(x, weight, None, before) is None
    inner = x[..., : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH))
    D = torch.ones(HEADS, requires_grad=True)
    assert parts.gated_norm(z, z, inner, D, torch.ones(z.shape[2]), 1e-5, 1) is None


@pytest.mark.parametrize("time", [1, 2, 70])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_scan_reads_the_parts_of_a_tensor_where_they_are(rows: int, time: int) -> None:
    h, p, n = HEADS, WIDTH, 5
    mixed = torch.randn(rows, time, h * p + 2 * n, generator=generator(6))
    x, B, C = mixed.split([h * p, n, n], dim=-1)
    x, B, C = x.unflatten(-1, (h, p)), B.unflatten(-1, (1, n)), C.unflatten(-1, (1, n))
    gain = torch.rand(rows, time, h, generator=generator(7))
    state = torch.randn(rows, h, p, n, generator=generator(8))
    given = (x, gain, -gain, B, C, state)
    for one, read in zip(given, readable_tokens(given), strict=True):
        assert one.data_ptr() == read.data_ptr()
    wanted = scan(*(one.contiguous() for one in given))
    for found, one in zip(scan(*given), wanted, strict=True):
        assert torch.equal(found, one)


def test_a_layer_with_an_edit_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution, the recurrence and the gated norm of `forget_more`."""
    mixer = build_mixer({"kind": "mamba2", "backend": "native", "d_state": 8, "head_dim": 8})
    assert isinstance(mixer, Mamba2)
    edit = ForgetMore().bind(0, mixer, torch.ones(mixer.n_heads, dtype=torch.bool))
    names: list[str] = []
    loaded = native.library()

    class Recorded:
        def __getattr__(self, name: str) -> object:
            names.append(name)
            return getattr(loaded, name)

    monkeypatch.setattr(native, "library", Recorded)
    x = torch.randn(1, 70, mixer.d_input, dtype=torch.float64)
    with torch.no_grad():
        mixer.run(x, mixer.init_state(1), edit, ())
    assert names == [f"longrnn_{name}_f64" for name in ("convolution", "scan", "gated_norm")]
