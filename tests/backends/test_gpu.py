"""What the GPU backends give to the kernels of other libraries, and what they refuse.

The kernels need a GPU. Here plain torch takes their place: that of flash-linear-attention itself,
and a loop for mamba-ssm. `test_gpu_kernels.py` runs the kernels themselves in an interpreter.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from longrnn.ops.scan import SCAN
from longrnn.ops.scan import fla as fla_scan
from longrnn.ops.scan import mamba_ssm as mamba_ssm_scan
from longrnn.ops.scan.definition import loop
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.window import initial_recent, windowed
from tests.backends.test_operations import (
    assert_near,
    inputs_from,
    of_scan,
    results,
    tensors_of,
)

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
    return inputs_from(x, gain, log_decay, B, C), torch.randn(rows, 4, size, size, generator=draw)


def outcome(function: Callable[..., Any], given: Sequence[Tensor]) -> list[Tensor]:
    """What a function returns, and the gradients of its arguments of a random loss."""
    return [one.detach() for one in results(function, *given, gradients=True)]


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


def wide(given: Sequence[Tensor]) -> list[Tensor]:
    return [one.double() for one in given]


# Functions in plain torch of flash-linear-attention by the names of kernels. That of `gla` computes
# one token after another, and divides by √n itself.
NAIVE = {
    "simple_gla": {"chunk": "naive_chunk", "fused_recurrent": "naive_recurrent"},
    "gla": {"chunk": "naive_recurrent", "fused_recurrent": "naive_recurrent"},
    "gated_delta_rule": {"chunk": "naive_chunk", "fused_recurrent": "naive_recurrent"},
    "kda": {"chunk": "naive_recurrent", "fused_recurrent": "naive_recurrent"},
}
# Kernels without gradients.
WITHOUT_GRADIENTS = ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda")


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plain torch of flash-linear-attention in place of its kernels, and which were called."""
    if find_spec("fla") is None:
        pytest.skip("fla-core is not installed")
    # Without fla.ops itself, which imports the kernels of forty other layers.
    operations = ModuleType("fla.ops")
    operations.__path__ = [f"{path}/ops" for path in import_module("fla").__path__]
    monkeypatch.setitem(sys.modules, "fla.ops", operations)
    called: list[str] = []
    for rule, kinds in NAIVE.items():
        module, naive = (import_module(f"fla.ops.{rule}{part}") for part in ("", ".naive"))
        for kind, plain in kinds.items():
            name = f"{kind}_{rule}"
            stand_in = partial(
                call_naive, called, name, getattr(module, name), getattr(naive, f"{plain}_{rule}")
            )
            monkeypatch.setattr(module, name, stand_in)
    return called


def call_naive(
    called: list[str],
    name: str,
    kernel: Callable[..., Any],
    naive: Callable[..., Any],
    *,
    q: Tensor,
    k: Tensor,
    **given: Any,
) -> Any:
    """Calls a function in plain torch in place of a kernel, whose arguments are checked."""
    inspect.signature(kernel).bind(q=q, k=k, **given)
    called.append(name)
    share = given["v"].shape[2] // q.shape[2]
    q, k = (one.repeat_interleave(share, 2) for one in (q, k))
    if name.endswith("_gla") and "simple" not in name:
        q = q * (given.pop("scale") * q.shape[-1] ** 0.5)
        given["gk"] = given.pop("g", given.get("gk"))
    with torch.set_grad_enabled(name not in WITHOUT_GRADIENTS and torch.is_grad_enabled()):
        return naive(q=q, k=k, **given)


def by_key(inputs: ScanInputs) -> ScanInputs:
    """Inputs whose keys have different decays, one of which never forgets."""
    rates = torch.linspace(0, 2, inputs.B.shape[3])
    log_decay = (inputs.decay.log()[..., None] * rates).nan_to_num(nan=-torch.inf)
    return inputs._replace(decay=Decay(log_decay))


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
        return loop(inputs_from(x, dt, dt * A, B, C), initial_states)

    module = ModuleType(mamba_ssm_scan.MODULE)
    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return called


@pytest.mark.parametrize("keys", [False, True], ids=["decays per head", "decays per key"])
@pytest.mark.parametrize(
    ("time", "groups", "starts"),
    [(1, 4, ()), (7, 2, (0, 3)), (64, 1, (5,)), (65, 2, ()), (150, 1, (70, 71, 100, 149))],
)
def test_fla_computes_the_recurrence(
    fla: list[str], time: int, groups: int, starts: Sequence[int], keys: bool
) -> None:
    inputs, state = random_inputs(time, groups=groups, starts=starts)
    inputs = by_key(inputs) if keys else inputs
    exact = outcome(of_scan(loop), wide([*tensors_of(inputs), state]))
    assert_near(outcome(of_scan(fla_scan.scan), [*tensors_of(inputs), state]), exact, 1e-5)
    kind = "fused_recurrent" if time <= 64 else "chunk"
    assert set(fla) == {f"{kind}_{'gla' if keys else 'simple_gla'}"}


def test_fla_takes_more_rows_than_a_grid_of_blocks(
    fla: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "FLA_MOST", 7)
    inputs, state = random_inputs(65)
    assert_near(fla_scan.scan(inputs, state), loop(inputs, state), 1e-5)
    assert fla == ["fused_recurrent_simple_gla"]


@pytest.mark.parametrize("keys", [False, True], ids=["decays per head", "decays per key"])
@pytest.mark.parametrize(
    ("time", "groups", "starts"), [(7, 2, (0, 3)), (65, 1, (5,)), (130, 4, ())]
)
def test_fla_computes_the_gated_delta_rule(
    fla: list[str], time: int, groups: int, starts: Sequence[int], keys: bool
) -> None:
    """Outputs, final state and all gradients; few tokens without gradients by another kernel."""
    inputs, state = random_inputs(time, groups=groups, starts=starts)
    unit = torch.nn.functional.normalize(inputs.B, dim=-1)
    inputs = inputs._replace(B=unit, gain=inputs.gain * 15)
    inputs = by_key(inputs) if keys else inputs
    exact = outcome(of_scan(partial(loop, erases=True)), wide([*tensors_of(inputs), state]))
    assert_near(
        outcome(of_scan(partial(fla_scan.scan, erases=True)), [*tensors_of(inputs), state]),
        exact,
        1e-5,
    )
    with torch.no_grad():
        y, after = fla_scan.scan(inputs, state, erases=True)
        assert_near([y, after], exact[:2], 1e-5)
        assert torch.equal(fla_scan.scan(inputs, state, final=False, erases=True)[0], y)
    rule, few = "kda" if keys else "gated_delta_rule", time <= 64
    assert fla == [f"chunk_{rule}"] + 2 * [f"{'fused_recurrent' if few else 'chunk'}_{rule}"]


def window_of_20(scan: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*given: Tensor) -> list[Tensor]:
        inputs = inputs_from(*given[:5])
        return [windowed(inputs, initial_recent(inputs, len(inputs.x)), 20, scan=scan)[0]]

    return compute


def with_rates(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> ScanInputs:
    """Inputs of a Mamba-2 without an edit."""
    return ScanInputs(x, dt, Decay(dt, A), B, C)


def mamba2_tensors(time: int) -> list[Tensor]:
    """x, dt, A, B, C and a state."""
    inputs, state = random_inputs(time)
    rates = -torch.tensor([1e-3, 0.1, 1.0, 16.0])
    return [inputs.x, inputs.gain, rates, inputs.B, inputs.C, state]


def test_mamba_ssm_computes_recurrences_without_edits(mamba_ssm: list[int]) -> None:
    given = mamba2_tensors(20)
    for keep in (None, torch.tensor([1.0, 0.9, 0.5, 1.0])):

        def run(scan: Any, *given: Tensor, keep: Any = keep) -> Any:
            inputs = with_rates(*given[:5])
            inputs = inputs._replace(decay=inputs.decay._replace(keep=keep))
            return scan(inputs, given[5])

        exact = outcome(partial(run, loop), wide(given))
        assert_near(outcome(partial(run, mamba_ssm_scan.scan), given), exact, 1e-5)
    assert mamba_ssm == [20]


def test_mamba_ssm_never_gets_offsets_beyond_32_bits(mamba_ssm: list[int]) -> None:
    def call(rows: int) -> None:
        x, dt, B, state = (
            torch.empty(rows, *shape, device="meta")
            for shape in ((3, 80, 64), (3, 80), (3, 1, 128), (80, 64, 128))
        )
        y, _ = mamba_ssm_scan.scan(with_rates(x, dt, dt[0, 0], B, B), state)
        assert y.shape == x.shape

    call(2**31 // (259 * 80 * 128))
    assert mamba_ssm == [3]
    call(2**31 // (259 * 80 * 128) + 1)
    assert mamba_ssm == [3]


@pytest.mark.usefixtures("fla", "mamba_ssm")
@pytest.mark.parametrize("run", [fla_scan.scan, mamba_ssm_scan.scan], ids=["fla", "ssm"])
def test_second_derivatives_are_refused(run: Any) -> None:
    given = [one.requires_grad_() for one in mamba2_tensors(20)]
    y, _ = run(with_rates(*given[:5]), given[5])
    with pytest.raises(UserError, match="torch"):
        torch.autograd.grad(y.sum(), given, create_graph=True)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Says which packages can be imported, and their versions."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")

    def install(**versions: str) -> None:
        gpu.missing.cache_clear()
        for name, package in (
            ("fla_core", fla_scan.FLA_KERNELS[False, False][0]),
            ("mamba_ssm", mamba_ssm_scan.MODULE),
        ):
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
        SCAN.choose("fla", *on_gpu())
        assert os.environ["TRITON_F32_DEFAULT"] == expected


def on_gpu(dtype: torch.dtype = torch.float32) -> tuple[ScanInputs, Tensor]:
    """Inputs and a state without memory."""
    with FakeTensorMode():
        rate, step, one = (torch.empty([2] * n, device="cuda", dtype=dtype) for n in (1, 3, 4))
        return ScanInputs(one, step, Decay(step, rate), one, one), one


def chosen_for(backend: str, given: tuple[ScanInputs, Tensor]) -> str:
    return SCAN.choose(backend, *given).name


def test_auto_takes_the_first_library_that_is_installed(packages: Callable[..., None]) -> None:
    fla, mamba = {"fla_core": "0.6.0", "triton": "3.7.1"}, {"mamba_ssm": "2.3.2.post1"}
    for installed, expected in (
        ({**fla, **mamba}, "fla"),
        (mamba, "mamba_ssm"),
        ({**fla, "fla_core": "0.5.2"}, "torch"),
        ({**fla, "triton": "3.6.0"}, "torch"),
        ({}, "torch"),
    ):
        packages(**installed)
        assert chosen_for("auto", on_gpu()) == expected, installed


@pytest.mark.parametrize("name", ["fla", "mamba_ssm"])
def test_a_named_backend_is_used_or_refused(name: str, packages: Callable[..., None]) -> None:
    packages(fla_core="0.6.0", triton="3.9.0", mamba_ssm="2.3.2.post1")
    assert chosen_for(name, on_gpu(torch.bfloat16)) == name
    *tensors, state = mamba2_tensors(3)
    on_cpu = with_rates(*tensors), state
    for given, reason in ((on_cpu, "NVIDIA"), (on_gpu(torch.float64), "float64")):
        assert chosen_for("auto", given) not in ("fla", "mamba_ssm")
        with pytest.raises(UserError, match=reason):
            SCAN.choose(name, *given)
    packages()
    with pytest.raises(UserError, match="pip install '(fla-core|mamba-ssm)>="):
        SCAN.choose(name, *on_gpu())
