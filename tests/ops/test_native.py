"""The C++ recurrence: every compiled library, any number of threads, and memory errors.

Their values are tested by the contract suites, through the backend `native`.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers import MIXERS
from longrnn.ops import native
from longrnn.ops.native import sources
from longrnn.ops.native.scan import scan
from longrnn.ops.ssd import BACKENDS, ScanInputs, chunked, resolve
from tests.contracts.builders import assert_near, generator

FOLDER = Path(native.__file__).parent
LIBRARIES = sorted(FOLDER.glob("_*.so"))
needs_kernels = pytest.mark.skipif(not native.available(), reason=str(native.missing()))
# Sizes that are and are not multiples of the vector width; one group and several.
SHAPES = [(2, 130, 4, 3, 2, 5), (1, 64, 8, 32, 1, 128), (1, 200, 6, 20, 3, 17), (3, 2, 2, 16, 1, 8)]


def draw(b: int, t: int, h: int, p: int, g: int, n: int) -> tuple[ScanInputs, Tensor]:
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=randomness, dtype=torch.float64)

    log_decay = -30 * torch.rand((b, t, h), generator=randomness, dtype=torch.float64) ** 8
    x, gain, B, C = normal(b, t, h, p), normal(b, t, h), normal(b, t, g, n), normal(b, t, g, n)
    return ScanInputs(x, gain, log_decay, B, C), normal(b, h, p, n)


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.name)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    wanted = {"_avx512": "AVX512", "_avx2": "AVX2"}.get(request.param.name.split(".")[0])
    names = list(native.CAPABILITIES)
    here = torch.backends.cpu.get_cpu_capability()
    if wanted is not None and names.index(wanted) < names.index(here):
        pytest.skip(f"this machine has no {wanted}")
    loaded = ctypes.CDLL(str(request.param))
    monkeypatch.setattr(native, "library", lambda: loaded)
    return loaded


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_compiled_library_gives_the_reference(
    library: ctypes.CDLL, shape: tuple[int, ...]
) -> None:
    inputs, state = draw(*shape)
    wanted = BACKENDS["reference"](inputs, state)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        narrow = ScanInputs(*(tensor.to(dtype) for tensor in inputs))
        for ours, exact in zip(scan(*narrow, state.to(dtype)), wanted, strict=True):
            assert_near(ours.double(), exact, tolerance)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_the_number_of_threads_changes_no_value(heads: int) -> None:
    """Heads of one group are divided among threads, and their scores are computed again."""
    inputs, state = draw(1, 500, heads, 16, 1, 32)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(scan(*inputs, state))
    for y, final in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(final, found[0][1])


@needs_kernels
def test_what_the_kernels_cannot_compute_is_left_to_torch() -> None:
    """Transforms of torch.func, and values that are not finite."""
    inputs, state = draw(2, 70, 4, 8, 1, 8)
    mapped = torch.vmap(lambda x: BACKENDS["native"](inputs._replace(x=x[None]), state[:1])[0])
    with torch.no_grad(), pytest.raises(RuntimeError):
        mapped(inputs.x)  # chunked reads values too; the kernels must not read a wrong address
    broken = inputs.x.clone()
    broken[0, 30] = math.nan
    ours = BACKENDS["native"](inputs._replace(x=broken), state)[0]
    wanted = chunked.ssd(inputs._replace(x=broken), state)[0]
    assert torch.equal(ours.isnan(), wanted.isnan())
    assert ours[0, :30].isfinite().all()
    assert ours[1].isfinite().all()


def test_without_kernels_auto_is_chunked_and_native_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.delitem(BACKENDS, "native", raising=False)
    assert resolve("auto") == "chunked"
    with pytest.raises(UserError):
        MIXERS.build({"kind": "mamba2", "backend": "native"}, 8, 64)


DRIVER = """
import ctypes, sys, torch
from longrnn.ops import native
from longrnn.ops.native import sources
loaded = ctypes.CDLL(sys.argv[1])
native.library = lambda: loaded
from longrnn.ops.native.gradients import scan_gradients
from longrnn.ops.native.limited import limited_scan
from longrnn.ops.native.scan import scan, segments_of
from tests.contracts.builders import build_mixer, generator, random_tree
from tests.ops.test_few_rows import FEW, draw_few
from tests.ops.test_native import SHAPES, draw
more = [(1, 1, 2, 5, 1, 3), (2, 3, 2, 5, 1, 3), (1, 129, 3, 7, 3, 9), (1, 1100, 5, 3, 1, 5)]
for shape in [*SHAPES, *more]:
    for dtype in (torch.float32, torch.float64):
        inputs, state = draw(*shape)
        tensors = tuple(tensor.to(dtype) for tensor in (*inputs, state))
        kept = tensors[5].new_empty(segments_of(shape[1]), *state.shape)
        y, final = scan(*tensors, kept=kept)
        for grad_final in (None, final):
            scan_gradients(tensors, kept, y, grad_final)
        for limit in (1e-3, 1.0, 1e3):
            limits = torch.full((shape[2],), limit, dtype=torch.float64)
            assert limited_scan(tensors, limits, 1e150) is not None
shapes = [{"d_state": 5, "head_dim": 4, "n_groups": 2}, {"d_state": 7, "head_dim": 16, "d_conv": 1}]
for options in shapes:
    for time in (1, 2, 3, 65, 200):
        mixer = build_mixer({"kind": "mamba2", "backend": "native", **options})
        x = torch.randn(2, time, mixer.d_input, generator=generator(1), dtype=torch.float64)
        trained, start = mixer.in_proj(x), random_tree(mixer.init_state(2), 2)
        found = mixer._fused(trained, start)
        (found[0].sum() + found[1].conv.sum() + found[1].ssm.sum()).backward()
        with torch.no_grad():
            assert mixer._fused(mixer.in_proj(x), start) is not None
            mixer.bfloat16()
            state = random_tree(mixer.init_state(2), 2)
            assert mixer._fused(mixer.in_proj(x.bfloat16()), state) is not None
for shape in FEW:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        native.few_rows(*draw_few(*shape, dtype))
    x, weight, bias = draw_few(*shape, torch.float32)
    native.few_rows(x, weight.to(torch.int8), bias, torch.ones(len(weight)))
from tests.ops import test_native_stepwise as stepwise
for spec in stepwise.CELLS:
    for dtype in stepwise.TOLERANCE:
        mixer = stepwise.wide_mixer(spec, dtype, 37)
        x, state = torch.ones(7, 20, 5, dtype=dtype), mixer.init_state(7)
        stepwise.both(mixer, x, state, stepwise.Edit())
        stepwise.both(mixer, x[:, :3], state, stepwise.Edit())
for spec in stepwise.CHAINS:
    stepwise.run_chain(spec, "lstm", [20, 3])
from tests.ops import test_native_layer as layers
for options in layers.SHAPES:
    for dtype in layers.TOLERANCE:
        model = layers.model_of(options, dtype)
        layers.decode(model, 3, model.init_state(3))
from tests.ops import test_native_parts as parts
for dtype in parts.TOLERANCES:
    for time in (1, 2, 70):
        for rows in (1, 2):
            parts.test_the_convolution_equals_that_of_torch(dtype, time, rows == 1)
            parts.test_the_gated_norm_equals_that_of_torch(dtype, rows, 1)
            parts.test_a_scan_reads_the_parts_of_a_tensor_where_they_are(rows, time)
from tests.ops import test_native_window as windows
for shape in windows.SHAPES:
    inputs, state = draw(*shape)
    for w in windows.WINDOWS:
        for sizes in ([shape[1]], windows.cuts(shape[1], w)):
            carry = windows.empty(inputs, state, w)
            windows.in_pieces(inputs, carry, w, sizes, windows.BACKENDS["native"])
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@needs_kernels
def test_the_kernels_touch_no_memory_that_is_not_theirs(tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers, at sizes with remainders."""
    library = tmp_path / "checked.so"
    flags = ["-O1", "-g", "-std=c++17", "-fopenmp", "-fPIC", "-shared"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = str(FOLDER / "kernels.cpp")
    subprocess.run(["g++", *flags, *checks, source, "-o", str(library)], check=True)
    runtime = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(library)],
        env={
            "LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "2", "PATH": "/usr/bin:/bin",
        },
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.strip() == "done", done.stderr[-3000:]


@needs_kernels
def test_libraries_of_other_sources_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of a checkout: they would read arguments of another layout."""
    monkeypatch.setattr(sources, "digest", lambda: "0" * 16)
    native.library.cache_clear()
    try:
        assert not native.available()
        assert native.missing()
        monkeypatch.setattr(sources, "digest", lambda: None)  # installed without its sources
        native.library.cache_clear()
        assert native.available()
    finally:
        native.library.cache_clear()
