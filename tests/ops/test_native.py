"""The C++ kernels: every compiled library, any number of threads, and memory errors.

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
from longrnn.mixers import MIXERS, Mixer
from longrnn.mixers.mamba2 import Mamba2, Mamba2State
from longrnn.ops import native
from longrnn.ops.linear import linear
from longrnn.ops.ssd import BACKENDS, ScanInputs, chunked, resolve
from tests.contracts.builders import assert_near, build_mixer, generator, random_tree

FOLDER = Path(native.__file__).parent
LIBRARIES = sorted(FOLDER.glob("_*.so"))
needs_kernels = pytest.mark.skipif(not native.available(), reason="the kernels were not compiled")
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
        for ours, exact in zip(native.scan(*narrow, state.to(dtype)), wanted, strict=True):
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
        found.append(native.scan(*inputs, state))
    for y, final in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(final, found[0][1])


@needs_kernels
@pytest.mark.parametrize("time", [1, 2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "options",
    [
        {"d_state": 5, "head_dim": 4, "n_groups": 2},
        {"d_state": 16, "head_dim": 8, "conv_bias": False, "d_conv": 1},
        {"d_state": 7, "head_dim": 16, "dt_limit": [0.01, 0.05]},
    ],
    ids=str,
)
def test_the_fused_cell_equals_its_parts(options: dict[str, object], time: int) -> None:
    """Outputs, both states, and with gradients those of the input, all weights and both states."""
    mixer, parts = (
        build_mixer({"kind": "mamba2", "backend": backend, **options})
        for backend in ("native", "chunked")
    )
    assert isinstance(mixer, Mamba2)
    parts.load_state_dict(mixer.state_dict())
    x = torch.randn(2, time, mixer.d_input, generator=generator(1), dtype=torch.float64)
    state: Mamba2State = random_tree(mixer.init_state(2), 2)
    assert mixer._fused(mixer.in_proj(x), state) is not None
    wanted = results(parts, x, state)
    with torch.no_grad():
        y, fused = mixer(x, state)
    found = results(mixer, x, state)
    for name, tensor in wanted.items():
        assert_near(found[name], tensor, 1e-12, name)
    for name, tensor in {"y": y, "conv": fused.conv, "ssm": fused.ssm}.items():
        assert torch.equal(tensor, found[name])
    assert torch.equal(found["conv"], wanted["conv"])


def results(mixer: Mixer, x: Tensor, state: Mamba2State) -> dict[str, Tensor]:
    """Outputs and states of a mixer, and the gradients of a fixed functional of all of them."""
    leaves = {"x": x.clone().requires_grad_()}
    leaves |= {f"before {k}": v.clone().requires_grad_() for k, v in state._asdict().items()}
    y, after = mixer(leaves["x"], Mamba2State(leaves["before conv"], leaves["before ssm"]))
    outputs = {"y": y, "conv": after.conv, "ssm": after.ssm}
    randomness = generator(9)
    loss = torch.zeros((), dtype=torch.float64)
    for one in outputs.values():
        loss = loss + (one * torch.randn(one.shape, generator=randomness, dtype=x.dtype)).sum()
    inputs = leaves | dict(mixer.named_parameters())
    found = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    return outputs | dict(zip(inputs, found, strict=True))


@needs_kernels
@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_gradients_of_the_cell_by_rounding_only() -> None:
    mixer = build_mixer({"kind": "mamba2", "backend": "native", "d_state": 8, "head_dim": 8})
    x = torch.randn(2, 150, mixer.d_input, generator=generator(1), dtype=torch.float64)
    state: Mamba2State = random_tree(mixer.init_state(2), 2)
    torch.set_num_threads(1)
    wanted = results(mixer, x, state)
    for count in (2, 3):
        torch.set_num_threads(count)
        for name, tensor in results(mixer, x, state).items():
            assert_near(tensor, wanted[name], 1e-13, name)


@needs_kernels
def test_second_derivatives_of_the_cell_are_those_of_its_parts() -> None:
    native_cell, parts = (
        build_mixer({"kind": "mamba2", "backend": backend, "d_state": 3, "head_dim": 8})
        for backend in ("native", "chunked")
    )
    parts.load_state_dict(native_cell.state_dict())
    x = torch.randn(1, 6, parts.d_input, generator=generator(1), dtype=torch.float64)
    found = []
    for mixer in (native_cell, parts):
        leaf, state = x.clone().requires_grad_(), mixer.init_state(1)
        (first,) = torch.autograd.grad(
            mixer(leaf, state)[0].square().sum(), leaf, create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), [leaf, *mixer.parameters()],
                                         materialize_grads=True))  # fmt: skip
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-11)


@needs_kernels
def test_training_leaves_a_row_that_is_not_finite_to_the_parts() -> None:
    """The outputs and gradients of the other rows are those without it."""
    mixer = build_mixer({"kind": "mamba2", "backend": "native", "d_state": 5, "head_dim": 4})
    x = torch.randn(3, 70, mixer.d_input, generator=generator(1), dtype=torch.float64)
    x[1, 30] = math.nan
    found = []
    for rows in ([0, 1, 2], [0, 2]):
        leaf = x[rows].clone().requires_grad_()
        y, _ = mixer(leaf, mixer.init_state(len(rows)))
        (grad,) = torch.autograd.grad(y.nan_to_num().square().sum(), leaf)
        found.append((y, grad))
    (y, grad), (clean_y, clean_grad) = found
    assert y[1, 30:].isnan().any()
    assert y[1, :30].isfinite().all()
    assert_near(y[[0, 2]], clean_y, 1e-12)
    assert_near(grad[[0, 2]], clean_grad, 1e-12)


@needs_kernels
def test_what_the_kernels_cannot_compute_is_left_to_torch() -> None:
    """Gradients, transforms of torch.func, and values that are not finite."""
    inputs, state = draw(2, 70, 4, 8, 1, 8)
    y, _ = BACKENDS["native"](inputs._replace(x=inputs.x.clone().requires_grad_()), state)
    assert y.requires_grad
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


def draw_few(
    rows: int, m: int, k: int, dtype: torch.dtype, *, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias of a product of few rows."""
    randomness = generator(3)
    shapes = ((rows, k), (m, k), (m,))
    x, weight, added = (torch.randn(shape, generator=randomness).to(dtype) for shape in shapes)
    return x, weight, added if bias else None


# The width of one step of the kernel, less, more, and with a remainder.
FEW = [(1, 9, 1), (2, 7, 31), (3, 5, 32), (4, 130, 65), (1, 64, 200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_products_of_few_rows_are_summed_in_float32(
    library: ctypes.CDLL, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The result is that of float64, rounded once to the dtype of x."""
    x, weight, bias = draw_few(*shape, dtype, bias=True)
    assert bias is not None
    y = native.few_rows(x, weight, bias)
    wanted = x.double() @ weight.double().t() + bias.double()
    assert y.dtype == dtype
    assert_near(y.double(), wanted, 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)
    torch.testing.assert_close(y.double(), wanted, rtol=torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_read_exactly(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Denormal numbers, zeros, infinities and NaN included, in both halves of a word."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for place in (0, 1, 64):  # the last is a remainder
        weight = torch.zeros(len(numbers), 65, dtype=dtype)
        weight[:, place] = numbers
        x = torch.ones(1, 65, dtype=dtype)
        y = native.few_rows(x, weight, None)[0]
        assert torch.equal(y.isnan(), numbers.isnan())
        known = ~numbers.isnan()
        assert torch.equal(y[known], numbers[known])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_reads_few_rows_with_the_kernel_unless_a_gradient_is_needed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = native.few_rows
    monkeypatch.setattr(native, "few_rows", lambda *a: calls.append(a) or original(*a))
    x, weight, bias = draw_few(4, 256, 64, dtype, bias=True)
    y = linear(x[None], weight, bias)
    assert len(calls) == 1
    assert y.shape == (1, 4, 256)
    tracked = linear(x, weight.clone().requires_grad_(), bias)
    assert tracked.requires_grad
    linear(x.repeat(2, 1), weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight, bias)
    mapped = torch.vmap(lambda row: linear(row[None], weight, bias))(x)
    assert len(calls) == 1, "only few rows without gradients, autocast and transforms"
    tolerance = 4 * torch.finfo(dtype).eps
    assert_near(mapped[:, 0].double(), y[0].double(), tolerance)
    with pytest.raises(RuntimeError, match="shapes"):
        linear(x[:, :-1], weight, bias)


@needs_kernels
@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fused_cell_reads_narrow_weights_as_they_are_now(dtype: torch.dtype, time: int) -> None:
    """It equals the cell in float32 with the same weights, after a change in place too."""
    options = {"kind": "mamba2", "backend": "native", "d_state": 8, "head_dim": 8, "n_groups": 2}
    narrow = build_mixer(options).to(dtype)
    assert isinstance(narrow, Mamba2)
    state: Mamba2State = random_tree(narrow.init_state(2), 2)
    # Wider than needed, so that a slice of it is not contiguous.
    wide_x = torch.randn(2, time, 2 * narrow.in_proj.out_features, generator=generator(1))
    projected = wide_x.to(dtype)[..., ::2]
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for weight in (narrow.conv1d.weight, narrow.A_log, narrow.norm.weight):
                weight.data.mul_(factor)  # a write that torch does not count
            wide = build_mixer(options).float()
            wide.load_state_dict(narrow.state_dict())
            found = narrow._fused(projected, state)
            assert isinstance(wide, Mamba2)
            wanted = wide._fused(projected.float(), state._replace(conv=state.conv.float()))
        assert found is not None
        assert wanted is not None
        assert found[0].dtype == found[1].conv.dtype == dtype
        assert_near(found[0].double(), wanted[0].double(), torch.finfo(dtype).eps)
        assert torch.equal(found[1].ssm, wanted[1].ssm)
        assert torch.equal(found[1].conv, wanted[1].conv.to(dtype))


def test_without_kernels_auto_is_chunked_and_native_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.delitem(BACKENDS, "native", raising=False)
    assert resolve("auto") == "chunked"
    with pytest.raises(UserError, match="were not compiled"):
        MIXERS.build({"kind": "mamba2", "backend": "native"}, 8, 64)


DRIVER = """
import ctypes, sys, torch
from longrnn.ops import native
loaded = ctypes.CDLL(sys.argv[1])
native.library = lambda: loaded
from longrnn.ops.native.gradients import scan_gradients
from longrnn.ops.native.limited import limited_scan
from tests.ops.test_native import FEW, SHAPES, draw, draw_few, build_mixer, generator, random_tree
more = [(1, 1, 2, 5, 1, 3), (2, 3, 2, 5, 1, 3), (1, 129, 3, 7, 3, 9), (1, 1100, 5, 3, 1, 5)]
for shape in [*SHAPES, *more]:
    for dtype in (torch.float32, torch.float64):
        inputs, state = draw(*shape)
        tensors = tuple(tensor.to(dtype) for tensor in (*inputs, state))
        kept = tensors[5].new_empty(native.segments_of(shape[1]), *state.shape)
        y, final = native.scan(*tensors, kept=kept)
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
