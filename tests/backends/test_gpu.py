"""What the GPU backends give to the kernels of other libraries, and what they refuse.

The kernels need a GPU. Here plain torch takes their place: that of flash-linear-attention itself,
and a loop for mamba-ssm. `test_gpu_kernels.py` runs the kernels themselves in an interpreter.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longrnn.errors import UserError
from longrnn.ops import gpu
from longrnn.ops.backend import BACKENDS, FLA, MAMBA_SSM, TORCH, choose
from longrnn.ops.delta import definition as delta
from longrnn.ops.scan.definition import ScanInputs, loop
from longrnn.ops.window import no_tokens, windowed
from tests.backends.test_operations import assert_near, cell_arguments, layer, results

pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")


def random_inputs(
    time: int, *, groups: int = 2, starts: Sequence[int] = (), rows: int = 2, size: int = 5
) -> tuple[ScanInputs, Tensor]:
    """Inputs of four heads with slow and fast decays, and a state."""
    draw = torch.Generator().manual_seed(time)
    x, B, C = (torch.randn(rows, time, axis, size, generator=draw) for axis in (4, groups, groups))
    gain = torch.rand(rows, time, 4, generator=draw) * 0.1 + 1e-3
    log_decay = gain * -torch.tensor([1e-3, 0.1, 1.0, 16.0])
    log_decay[-1, list(starts)] = -torch.inf
    return ScanInputs(x, gain, log_decay, B, C), torch.randn(rows, 4, size, size, generator=draw)


def outcome(function: Callable[..., Any], given: Sequence[Tensor]) -> list[Tensor]:
    """What a function returns, and the gradients of its arguments of a random loss."""
    return [one.detach() for one in results(function, *given, gradients=True)]


def of_scan(scan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: scan(ScanInputs(*given[:5]), *given[5:])


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


def wide(given: Sequence[Tensor]) -> list[Tensor]:
    return [one.double() for one in given]


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plain torch of flash-linear-attention in place of its kernels, and which were called."""
    if find_spec("fla") is None:
        pytest.skip("fla-core is not installed")
    module, naive = import_module("fla.ops.simple_gla"), import_module("fla.ops.simple_gla.naive")
    called = []

    def put(name: str) -> None:
        def call(**given: Any) -> Any:
            called.append(name)
            return getattr(naive, f"naive_{name}_simple_gla")(**given)

        kernel = f"{'fused_' if name == 'recurrent' else ''}{name}_simple_gla"
        monkeypatch.setattr(module, kernel, call)

    put("chunk")
    put("recurrent")
    return called


@pytest.fixture
def mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A loop in place of the kernels of mamba-ssm, and the lengths of the calls."""
    called = []

    def mamba_chunk_scan_combined(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *,
        initial_states: Tensor,
        return_final_states: bool,
    ) -> tuple[Tensor, Tensor]:
        assert return_final_states
        called.append(x.shape[1])
        return loop(ScanInputs(x, dt, dt * A, B, C), initial_states)

    module = ModuleType(gpu.MAMBA_SSM[0])
    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return called


@pytest.mark.parametrize(
    ("time", "groups", "starts"),
    [(1, 4, ()), (7, 2, (0, 3)), (64, 1, (5,)), (65, 2, ()), (150, 1, (70, 71, 100, 149))],
)
def test_fla_computes_the_recurrence(
    fla: list[str], time: int, groups: int, starts: Sequence[int]
) -> None:
    """Outputs, final state and the gradients of all inputs."""
    inputs, state = random_inputs(time, groups=groups, starts=starts)
    exact = outcome(of_scan(loop), wide([*inputs, state]))
    assert_near(outcome(of_scan(FLA.scan), [*inputs, state]), exact, 1e-5)
    assert set(fla) == {"recurrent" if time <= 64 else "chunk"}


def test_fla_takes_more_rows_than_a_grid_of_blocks(
    fla: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "FLA_MOST", 7)
    inputs, state = random_inputs(65)
    assert_near(FLA.scan(inputs, state), loop(inputs, state), 1e-5)
    assert fla == ["recurrent"]


@pytest.fixture
def fla_delta(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plain torch in place of the gated delta rules of flash-linear-attention."""
    if find_spec("fla") is None:
        pytest.skip("fla-core is not installed")
    module, called = import_module(gpu.FLA_DELTA), []
    naive = import_module(f"{gpu.FLA_DELTA}.naive")

    def put(name: str, differentiable: bool) -> None:
        rule = getattr(module, f"{name}_gated_delta_rule")
        plain = getattr(naive, f"naive_{name.removeprefix('fused_')}_gated_delta_rule")

        def call(*, q: Tensor, k: Tensor, **given: Any) -> Any:
            inspect.signature(rule).bind(q=q, k=k, **given)
            called.append(name)
            share = given["v"].shape[2] // q.shape[2]
            q, k = (one.repeat_interleave(share, 2) for one in (q, k))
            with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
                return plain(q=q, k=k, **given)

        monkeypatch.setattr(module, f"{name}_gated_delta_rule", call)

    put("chunk", True)
    put("fused_recurrent", False)
    return called


@pytest.mark.parametrize(
    ("time", "groups", "starts"), [(7, 2, (0, 3)), (65, 1, (5,)), (130, 4, ())]
)
def test_fla_computes_the_gated_delta_rule(
    fla_delta: list[str], time: int, groups: int, starts: Sequence[int]
) -> None:
    """Outputs, final state and all gradients; few tokens without gradients by another kernel."""
    inputs, state = random_inputs(time, groups=groups, starts=starts)
    unit = torch.nn.functional.normalize(inputs.B, dim=-1)
    inputs = inputs._replace(B=unit, gain=inputs.gain * 15)
    exact = outcome(of_scan(delta.loop), wide([*inputs, state]))
    assert_near(outcome(of_scan(FLA.delta), [*inputs, state]), exact, 1e-5)
    with torch.no_grad():
        y, after = FLA.delta(inputs, state)
        assert_near([y, after], exact[:2], 1e-5)
        assert torch.equal(FLA.delta(inputs, state, final=False)[0], y)
    assert fla_delta == ["chunk"] + 2 * ["fused_recurrent" if time <= 64 else "chunk"]


def window_of_20(ops: Any) -> Callable[..., Any]:
    def compute(*given: Tensor) -> list[Tensor]:
        inputs = ScanInputs(*given[:5])
        return [windowed(inputs, no_tokens(inputs, len(inputs.x)), 20, ops.scan)[0]]

    return compute


def test_mamba_ssm_computes_layers_without_edits(mamba_ssm: list[int]) -> None:
    """Outputs, states and the gradients of all weights; edited layers have the scan of torch."""
    given, cell = layer(*cell_arguments(torch.float32, tokens=20))
    assert_near(outcome(cell(MAMBA_SSM), given), outcome(cell(TORCH), wide(given)), 1e-5)
    assert mamba_ssm == [20]
    gated = MAMBA_SSM._replace(gate=lambda y, *others: y.flatten(2)).composed()
    cell(gated)(*given)
    assert mamba_ssm == [20, 20], "a layer with another gate does not use the kernels"
    assert MAMBA_SSM.scan is TORCH.scan


def test_mamba_ssm_never_gets_offsets_beyond_32_bits(mamba_ssm: list[int]) -> None:
    def call(rows: int) -> None:
        x, dt, B, state = (
            torch.empty(rows, *shape, device="meta")
            for shape in ((3, 80, 64), (3, 80), (3, 1, 128), (80, 64, 128))
        )
        y, _ = gpu.mamba_ssm_recurrence(x, dt, dt[0, 0], B, B, state)
        assert y.shape == x.shape

    call(2**31 // (259 * 80 * 128))
    assert mamba_ssm == [3]
    call(2**31 // (259 * 80 * 128) + 1)
    assert mamba_ssm == [3]


@pytest.mark.usefixtures("fla", "mamba_ssm")
@pytest.mark.parametrize("ops", [FLA, MAMBA_SSM], ids=["fla", "mamba_ssm"])
def test_second_derivatives_are_refused(ops: Any) -> None:
    given, cell = layer(*cell_arguments(torch.float32, tokens=20))
    given = [one.requires_grad_() for one in given]
    y, *_ = cell(ops)(*given)
    with pytest.raises(UserError, match="torch"):
        torch.autograd.grad(y.sum(), given, create_graph=True)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Says which packages can be imported, and their versions."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")

    def install(**versions: str) -> None:
        gpu.missing.cache_clear()
        for name, package in (("fla_core", gpu.FLA[0]), ("mamba_ssm", gpu.MAMBA_SSM[0])):
            module = ModuleType(package) if name in versions else None
            monkeypatch.setitem(sys.modules, package, module)
        found = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(gpu, "version", lambda name: found.get(name, "0"))

    yield install
    gpu.missing.cache_clear()


def test_products_have_the_digits_of_float32_by_default(
    packages: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton reads its precision from the environment, in which a user may ask for another one."""
    for chosen, expected in (("", "tf32x3"), ("tf32", "tf32")):
        monkeypatch.setenv("TRITON_F32_DEFAULT", chosen)
        if not chosen:
            monkeypatch.delenv("TRITON_F32_DEFAULT")
        packages(fla_core="0.6.0", triton="3.7.1")
        choose("fla", on_gpu())
        assert os.environ["TRITON_F32_DEFAULT"] == expected


def on_gpu(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(2, device="cuda", dtype=dtype)]


def test_auto_takes_the_first_library_that_is_installed(packages: Callable[..., None]) -> None:
    fla, mamba = {"fla_core": "0.6.0", "triton": "3.7.1"}, {"mamba_ssm": "2.3.2.post1"}
    for installed, expected in (
        ({**fla, **mamba}, FLA),
        (mamba, MAMBA_SSM),
        ({**fla, "fla_core": "0.5.2"}, TORCH),
        ({**fla, "triton": "3.6.0"}, TORCH),
        ({}, TORCH),
    ):
        packages(**installed)
        assert choose("auto", on_gpu()) is expected, installed


@pytest.mark.parametrize("name", ["fla", "mamba_ssm"])
def test_a_named_backend_is_used_or_refused(name: str, packages: Callable[..., None]) -> None:
    packages(fla_core="0.6.0", triton="3.9.0", mamba_ssm="2.3.2.post1")
    assert choose(name, on_gpu(torch.bfloat16)) is BACKENDS[name]
    for tensors, reason in (([torch.ones(2)], "NVIDIA"), (on_gpu(torch.float64), "float64")):
        assert choose("auto", tensors).scan is not FLA.scan
        with pytest.raises(UserError, match=reason):
            choose(name, tensors)
    packages()
    with pytest.raises(UserError, match="pip install '(fla-core|mamba-ssm)>="):
        choose(name, on_gpu())
