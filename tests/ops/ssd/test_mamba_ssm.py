"""The backend mamba_ssm: what it computes, and what it refuses.

The kernels of mamba-ssm run on a GPU. Here a loop with the signature of their function takes their
place, and in a slow test they run under Triton's interpreter.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.ops.ssd import BACKENDS, ScanInputs, mamba_ssm, resolve, select
from tests.contracts.builders import assert_near, generator
from tests.refusals import naming

VERSION = "2.3.2.post1"
ROOT = Path(__file__).parents[3]


def combined(
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
    """What `mamba_chunk_scan_combined` computes, token by token; y has the dtype of x."""
    assert return_final_states
    heads, groups = x.shape[2], B.shape[2]
    B, C = (each.float().repeat_interleave(heads // groups, dim=2) for each in (B, C))
    h, outputs = initial_states, []
    for t in range(x.shape[1]):
        added = torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], B[:, t])
        h = torch.exp(dt[:, t] * A)[:, :, None, None] * h + added
        outputs.append(torch.einsum("bhpn,bhn->bhp", h, C[:, t]))
    return torch.stack(outputs, 1).to(x.dtype), h


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """`combined` stands for the kernels, on a CPU."""
    monkeypatch.setattr(mamba_ssm, "combined", lambda: combined)
    monkeypatch.setattr(mamba_ssm, "DEVICES", ("cpu",))


def plain(time: int = 9, dtype: torch.dtype = torch.float32) -> tuple[ScanInputs, Tensor]:
    """Inputs of a Mamba-2 without mitigations: log_decay = gain · A."""
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=randomness)

    gain = torch.rand(2, time, 4, generator=randomness) * 0.2 + 1e-3
    rates = -torch.rand(4, generator=randomness) * 16 - 0.1
    x, B, C = (normal(2, time, *shape).to(dtype) for shape in ((4, 3), (2, 5), (2, 5)))
    return ScanInputs(x, gain, gain * rates, B, C), normal(2, 4, 3, 5)


def outcome(backend: Any, inputs: ScanInputs, state: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (*inputs, state)]
    y, final = backend(ScanInputs(*leaves[:-1]), leaves[-1])
    weights = [torch.randn(out.shape, generator=generator(1)) for out in (y, final)]
    loss = (y * weights[0]).sum() + (final * weights[1]).sum()
    return [y.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.usefixtures("loop")
def test_values_and_partial_derivatives_equal_the_reference() -> None:
    """gain and log_decay each have a gradient of their own, though the kernels return their sum."""
    inputs, state = plain()
    wide = ScanInputs(*(tensor.double() for tensor in inputs))
    expected = outcome(BACKENDS["reference"], wide, state.double())
    names = ("y", "state", *(f"gradient of {name}" for name in (*ScanInputs._fields, "state")))
    for name, ours, theirs in zip(
        names, outcome(mamba_ssm.ssd, inputs, state), expected, strict=True
    ):
        assert_near(ours, theirs, 1e-5, name)


@pytest.mark.usefixtures("loop")
def test_bfloat16_inputs_keep_the_state_wide() -> None:
    inputs, state = plain(dtype=torch.bfloat16)
    y, final = mamba_ssm.ssd(inputs, state)
    exact, exact_final = BACKENDS["reference"](inputs, state)
    assert y.dtype == final.dtype == torch.float32
    assert_near(final, exact_final, 1e-5)
    assert_near(y, exact, 2**-8)  # the kernels round y to the dtype of x


def document(inputs: ScanInputs) -> ScanInputs:
    log_decay = inputs.log_decay.clone()
    log_decay[0, 3] = -torch.inf
    return inputs._replace(log_decay=log_decay)


def per_token(inputs: ScanInputs) -> ScanInputs:
    log_decay = inputs.log_decay.clone()
    log_decay[1, 2, 3] *= 1.001
    return inputs._replace(log_decay=log_decay)


def without_input(inputs: ScanInputs) -> ScanInputs:
    gain = inputs.gain.clone()
    gain[0, 1, 0] = 0
    return inputs._replace(gain=gain)


def never_forgets(inputs: ScanInputs) -> ScanInputs:
    return inputs._replace(log_decay=torch.zeros_like(inputs.log_decay))


def not_a_number(inputs: ScanInputs) -> ScanInputs:
    return inputs._replace(gain=inputs.gain * torch.nan)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("change", [per_token, without_input, never_forgets, not_a_number])
def test_decays_that_the_interface_cannot_express_are_refused(change: Any) -> None:
    """Also where a single token of a single head differs."""
    inputs, state = plain()
    with pytest.raises(UserError, match=naming("backend", "triton")):
        mamba_ssm.ssd(change(inputs), state)


@pytest.mark.usefixtures("loop")
def test_documents_within_a_row_are_refused() -> None:
    inputs, state = plain()
    with pytest.raises(UserError, match="document"):
        mamba_ssm.ssd(document(inputs), state)


@pytest.mark.usefixtures("loop")
def test_float64_is_refused() -> None:
    inputs, state = plain()
    with pytest.raises(UserError, match=naming("float64", "float32")):
        mamba_ssm.ssd(inputs, state.double())


def test_tensors_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_ssm, "combined", lambda: combined)
    with pytest.raises(UserError, match="cpu"):
        mamba_ssm.ssd(*plain())


def strided(rows: int, time: int, width: int) -> tuple[ScanInputs, Tensor]:
    """Views of one tensor of `width` numbers per token, in the shape of mamba2-2.7b, no memory."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(rows, *shape, device="meta")

    whole = meta(time, width)
    x = whole[..., -5376:-256].unflatten(-1, (80, 64))
    B, C = whole[..., None, -256:-128], whole[..., None, -128:]
    gain = meta(time, 80)
    return ScanInputs(x, gain, gain, B, C), meta(80, 64, 128)


@pytest.mark.parametrize(
    ("rows", "width", "longest", "name"),
    [
        (1, 10_576, 203_052, "x"),  # views of the input projection
        (1, 5376, 399_457, "x"),  # views of the convolution
        (4, 5376, 99_864, "x"),
    ],
)
def test_the_longest_call(rows: int, width: int, longest: int, name: str) -> None:
    """2^31 divided by the stride of a token, with the offsets of other rows taken off."""
    found, limiting = mamba_ssm.longest_call(*strided(rows, 100_000, width))
    if rows == 1:
        assert (found, limiting) == (longest, name)
    # The last entry of the last row is within the 32 bits, and one token more might not be.
    offset = (rows - 1) * 100_000 * width + found * width
    assert offset <= 2**31 < offset + width


def test_many_groups_of_small_states_shorten_the_longest_call() -> None:
    """The kernels keep C Bᵀ of each chunk and group, 256 numbers per token and group."""
    inputs, state = plain(9)
    groups = [one.new_empty(2, 9, 64, 5) for one in (inputs.B, inputs.C)]
    found = mamba_ssm.longest_call(inputs._replace(B=groups[0], C=groups[1]), state)
    assert found == (2**31 // (2 * 64 * 256), "the products of C and B")


@pytest.mark.usefixtures("loop")
def test_a_call_beyond_the_longest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the limit; one token less is computed."""
    monkeypatch.setattr(mamba_ssm, "OFFSETS", 2 * 9 * 1200)  # two rows of nine tokens

    def spread(time: int) -> tuple[ScanInputs, Tensor]:
        inputs, state = plain(time)
        x = torch.zeros(2, time, 1200)[..., :12].unflatten(-1, (4, 3))
        return inputs._replace(x=x), state

    mamba_ssm.ssd(*spread(9))
    with pytest.raises(UserError, match=naming(10, 8)):
        mamba_ssm.ssd(*spread(10))


def small(backend: str) -> RecurrentLM:
    torch.manual_seed(0)
    mixer = {"kind": "mamba2", "d_state": 8, "head_dim": 4, "backend": backend}
    return RecurrentLM(RecurrentConfig(16, 8, 1, mixer))


@pytest.mark.usefixtures("loop")
def test_a_model_equals_the_same_model_with_chunked() -> None:
    """Logits and gradients of every weight."""
    tokens = torch.randint(16, (2, 20), generator=generator(3))
    found = []
    for backend in ("chunked", "mamba_ssm"):
        model = small(backend)
        logits = model(tokens).logits
        logits.logsumexp(-1).sum().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for theirs, ours in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-5)


@pytest.mark.usefixtures("loop")
def test_no_graph_captures_its_checks() -> None:
    """Its checks wait for the device, which a CUDA graph cannot do."""
    assert small("chunked").is_capturable
    assert not small("mamba_ssm").is_capturable


@pytest.mark.usefixtures("loop")
def test_a_mitigation_is_computed_or_refused() -> None:
    """A constant factor of decays is one more number per head; a choice of tokens is refused."""
    tokens = torch.randint(16, (2, 20), generator=generator(3))
    spec = mitigation("scale_decay(scale=1.5)")
    ours, theirs = (
        Mitigated(small(backend), spec)(tokens).logits for backend in ("mamba_ssm", "chunked")
    )
    assert_near(ours, theirs, 1e-5)
    filtered = Mitigated(small("mamba_ssm"), mitigation("token_filter(threshold=0.05)"))
    with pytest.raises(UserError, match="mitigation"):
        filtered(tokens)


@pytest.mark.skipif(find_spec("mamba_ssm") is not None, reason="mamba-ssm is installed")
def test_without_the_package_the_backend_is_refused() -> None:
    """By name, with the command that installs it, and `auto` never selects it."""
    with pytest.raises(UserError, match="pip install"):
        resolve("mamba_ssm")
    with pytest.raises(UserError, match="pip install"):
        select("mamba_ssm")
    assert resolve("auto") != "mamba_ssm"


@pytest.mark.parametrize("error", [RuntimeError("0 active drivers ([])"), OSError("no libcuda.so")])
def test_a_package_that_cannot_be_loaded_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiled parts raise other errors than ImportError on another machine."""

    class Loader(importlib.abc.Loader):
        def exec_module(self, module: Any) -> None:
            raise error

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            return spec_from_loader(name, Loader()) if name == "mamba_ssm" else None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        monkeypatch.delitem(sys.modules, name)
    mamba_ssm.combined.cache_clear()
    with pytest.raises(UserError, match="mamba-ssm"):
        resolve("mamba_ssm")


# Runs mamba-ssm's own kernels on a CPU and prints the largest relative error of each result.
INTERPRETED = """
import contextlib, importlib.machinery, json, os, sys, types

root = sys.argv[1]
for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.utils"):  # without the compiled extension
    package = types.ModuleType(name)
    package.__path__ = [os.path.join(root, *name.split("."))]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
import torch

torch.cuda.device = lambda index: contextlib.nullcontext()
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=4)
from longrnn.ops.ssd import BACKENDS, ScanInputs, mamba_ssm

mamba_ssm.DEVICES = ("cpu",)
mamba_ssm.CHUNK = 16
from tests.ops.ssd.test_mamba_ssm import outcome

draw = torch.Generator().manual_seed(0)
x, B, C = (torch.randn(1, 40, *s, generator=draw) for s in ((2, 16), (1, 16), (1, 16)))
state = torch.randn(1, 2, 16, 16, generator=draw)
usual = torch.rand(1, 40, 2, generator=draw) * 0.1 + 1e-3
strong_then_slow = torch.full_like(usual, 1e-4)
strong_then_slow[:, ::8] = 250.0
found = []
for gain in (usual, strong_then_slow):
    inputs = ScanInputs(x, gain, gain * -torch.tensor([1.0, 8.0]), B, C)
    ours = outcome(mamba_ssm.ssd, inputs, state)
    wide = ScanInputs(*(tensor.double() for tensor in inputs))
    exact = outcome(BACKENDS["reference"], wide, state.double())
    chunked = outcome(BACKENDS["chunked"], inputs, state)
    for each in (ours, chunked):
        pairs = zip(each, exact)
        found.append([float((a - b).abs().max() / b.abs().max()) for a, b in pairs])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of mamba-ssm, which is not installed; the test is skipped where it is missing."""
    folder = tmp_path_factory.mktemp("mamba_ssm")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--quiet", "--dest", str(folder), f"mamba-ssm=={VERSION}"]
    environment = {**os.environ, "MAMBA_SKIP_CUDA_BUILD": "TRUE", "MAMBA_FORCE_BUILD": "TRUE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"mamba-ssm {VERSION} could not be downloaded: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(path.parent for path in folder.glob("*/mamba_ssm"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_its_own_kernels_agree_under_the_interpreter(source: Path) -> None:
    """Values within 1e-5 and gradients within 1e-4 of the loop in float64, at usual decays.

    Where a strong decay precedes slow ones, its sums in float32 lose digits that ours keep.
    """
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(source)],
        env={**os.environ, "TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    usual, _, strong, ours = json.loads(done.stdout.splitlines()[-1])
    assert max(usual[:2]) < 1e-5, usual
    assert max(usual[2:]) < 1e-4, usual
    assert 1e-5 < max(strong[:2]) < 1e-3, strong
    assert max(ours[:2]) < 1e-6, ours
