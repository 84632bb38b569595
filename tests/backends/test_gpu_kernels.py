"""The kernels of flash-linear-attention and mamba-ssm themselves, in Triton's interpreter."""

import json
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAMBA_SSM_VERSION = "2.3.2.post1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]

# Runs the kernels of a library in Triton's interpreter, and prints the largest relative error of
# each result and gradient. `{shim}` makes the library import on a machine without a GPU.
INTERPRETED = """
import json, sys, warnings
from functools import partial
warnings.simplefilter("ignore")
import torch
from triton.runtime.autotuner import Autotuner

first = Autotuner.__init__
Autotuner.__init__ = lambda self, fn, names, configs, *args, **named: first(
    self, fn, names, configs[:1], *args, **named
)
{shim}
from tests.backends.test_gpu import by_key, error, outcome, random_inputs, wide, window_of_20
from tests.backends.test_operations import inputs_from, of_scan, tensors_of
from longrnn.ops.scan import definition as scan
from longrnn.ops.scan import fla as fla_scan
from longrnn.ops.scan import mamba_ssm
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.definition import loop

delta_loop, fla_delta = partial(loop, erases=True), partial(fla_scan.scan, erases=True)
found = []
{calls}
print(json.dumps(found))
"""
FLA_SHIM = """
from fla.ops.common import chunk_delta_h, chunk_h

class Index(int):  # what `range` yields in a compiled kernel has this method
    def to(self, dtype):
        return self

chunk_h.range = chunk_delta_h.range = lambda *ends: map(Index, range(*map(int, ends)))
"""
FLA_CALLS = """
for time, starts in ((5, (2,)), (70, (20, 66))):
    inputs, state = random_inputs(time, groups=1, starts=starts, rows=1, size=16)
    exact = outcome(of_scan(loop), wide([*tensors_of(inputs), state]))
    ours = outcome(of_scan(fla_scan.scan), [*tensors_of(inputs), state])
    found.append([error(*pair) for pair in zip(ours, exact)])
    keys = torch.nn.functional.normalize(inputs.B, dim=-1)
    inputs = inputs._replace(B=keys, gain=inputs.gain * 15)
    exact = outcome(of_scan(delta_loop), wide([*tensors_of(inputs), state]))
    ours = outcome(of_scan(fla_delta), [*tensors_of(inputs), state])
    found.append([error(*pair) for pair in zip(ours, exact)])
    with torch.no_grad():
        found.append([error(*pair) for pair in zip(fla_delta(inputs, state), exact)])
    inputs = by_key(inputs)
    for loop_of, fast in ((loop, fla_scan.scan), (delta_loop, fla_delta)):
        exact = outcome(of_scan(loop_of), wide([*tensors_of(inputs), state]))
        ours = outcome(of_scan(fast), [*tensors_of(inputs), state])
        found.append([error(*pair) for pair in zip(ours, exact)])
inputs, _ = random_inputs(27, groups=1, rows=1, size=16)
exact = outcome(window_of_20(scan.scan), wide(tensors_of(inputs)))
ours = outcome(window_of_20(fla_scan.scan), tensors_of(inputs))
found.append([error(*pair) for pair in zip(ours, exact)])
"""
MAMBA_SSM_SHIM = """
import contextlib, importlib.machinery, os, types

for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.utils"):  # without the compiled extension
    package = types.ModuleType(name)
    package.__path__ = [os.path.join(sys.argv[1], *name.split("."))]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
torch.cuda.device = lambda index: contextlib.nullcontext()
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=4)
"""
MAMBA_SSM_CALLS = """
mamba_ssm.MAMBA_SSM_CHUNK = 16
inputs, state = random_inputs(40, groups=1, rows=1, size=16)
x, gain, log_decay, B, C = tensors_of(inputs)
given = [x, gain, log_decay[0, 0] / gain[0, 0], B, C, state]

def exactly(x, dt, A, B, C, state):
    return loop(inputs_from(x, dt, dt * A, B, C), state)

def ours_is(x, dt, A, B, C, state):
    return mamba_ssm.scan(ScanInputs(x, dt, Decay(dt, A), B, C), state)

exact, ours = outcome(exactly, wide(given)), outcome(ours_is, given)
found.append([error(*pair) for pair in zip(ours, exact)])
"""

MAMBA3_CALLS = """
import triton.language as tl
from mamba_ssm.ops.triton.mamba3 import mamba3_siso_step as theirs
from longrnn.cells import Mamba3
from longrnn.ops.norm import rms_norm
from tests.contracts.builders import stirred

theirs.cos_approx, theirs.sin_approx = lambda x: tl.cos(x), lambda x: tl.sin(x)
theirs.sigmoid_approx = lambda x: tl.sigmoid(x)
theirs.tanh_approx = lambda x: 2 * tl.sigmoid(2 * x) - 1
theirs.silu = lambda x: x * tl.sigmoid(x)

class Language:  # the kernel reads its state in bfloat16, which the interpreter does not multiply
    def __getattr__(self, name):
        return getattr(tl, "float32" if name == "bfloat16" else name)

theirs.triton_language, theirs.tl = tl, Language()
h, p, g, n = 4, 8, 2, 16
cell = stirred(Mamba3(16, 16, d_state=n, head_dim=p, n_groups=g, backend="torch"), 0)
x, ours, expected = torch.randn(2, 7, 16), [], []
cell.out_proj.register_forward_pre_hook(lambda _, args: ours.append(args[0]))
with torch.no_grad():
    _, after = cell(x, cell.init_state(2))
    state = [torch.zeros(2, h, *size) for size in ((cell.n_angles,), (p, n), (n,), (p,))]
    for token in cell.in_proj(x).unbind(1):
        z, v, B, C, dt, A, mix, theta = token.split(cell.in_sizes, -1)
        B = rms_norm(B.view(2, g, n), cell.B_norm.weight, 1e-5)
        C = rms_norm(C.view(2, g, n), cell.C_norm.weight, 1e-5)
        dt = torch.nn.functional.softplus(dt + cell.dt_bias)
        A = -torch.nn.functional.softplus(A).clamp(min=1e-4)
        z, v = (one.reshape(2, h, p).contiguous() for one in (z, v))
        theta = theta[:, None].expand(-1, h, -1).contiguous()
        y, (angle, ssm, B, *_) = theirs.mamba3_siso_step(
            C, B, v, A * dt, dt, mix, cell.C_bias, cell.B_bias, theta, cell.D, z, state
        )
        state = [angle, ssm, B, v]
        expected.append(y.flatten(1))
pairs = [(ours[0], torch.stack(expected, 1)), (after.angle, state[0]), (after.ssm, state[1])]
pairs += [(after.B, state[2]), (after.x, state[3])]
found.append([error(one, other.double()) for one, other in pairs])
"""


def interpreted(shim: str, calls: str, *arguments: str) -> list[list[float]]:
    environment = {"TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(shim=shim, calls=calls), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(find_spec("fla") is None, reason="fla-core is not installed")
def test_fla_agrees_with_the_loop() -> None:
    """Also the gated delta rule, whose kernel for few tokens has no gradients."""
    for found in interpreted(FLA_SHIM, FLA_CALLS):
        assert max(found) < 1e-5, found


@pytest.fixture(scope="module")
def mamba_ssm_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of mamba-ssm, which cannot be installed without a GPU's compiler."""
    folder = tmp_path_factory.mktemp("mamba_ssm")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--quiet", "--dest", str(folder)]
    done = subprocess.run(
        [*command, f"mamba-ssm=={MAMBA_SSM_VERSION}"],
        env={**os.environ, "MAMBA_SKIP_CUDA_BUILD": "TRUE", "MAMBA_FORCE_BUILD": "TRUE"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"mamba-ssm cannot be downloaded: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(path.parent for path in folder.glob("*/mamba_ssm"))


def test_mamba_ssm_agrees_with_the_loop(mamba_ssm_source: Path) -> None:
    (found,) = interpreted(MAMBA_SSM_SHIM, MAMBA_SSM_CALLS, str(mamba_ssm_source))
    assert max(found) < 1e-5, found


def test_mamba3_agrees_with_mamba_ssm(mamba_ssm_source: Path) -> None:
    """Outputs and states of seven tokens, by the kernel of mamba-ssm for one token."""
    (found,) = interpreted(MAMBA_SSM_SHIM, MAMBA3_CALLS, str(mamba_ssm_source))
    assert max(found) < 1e-5, found
