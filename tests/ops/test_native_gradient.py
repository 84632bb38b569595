"""The gradient of the recurrence in C++: exact for any split and number of threads.

The contract suites compare it too, through the backend `native`, at the edges of chunks.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from longrnn.ops.ssd import BACKENDS, ScanInputs
from torch import Tensor

from longrnn.ops import native
from tests.contracts.builders import assert_near, generator
from tests.ops.test_native import SHAPES, draw, library, needs_kernels, threads

__all__ = ["library", "threads"]  # fixtures

# More than one segment, whose states are kept; several rows, groups and heads; odd sizes.
LONG = [(1, native.SEGMENT, 2, 4, 1, 3), (2, 2 * native.SEGMENT + 67, 6, 3, 2, 5)]


def gradients(
    inputs: ScanInputs,
    state: Tensor,
    *,
    backend: str = "native",
    dtype: torch.dtype = torch.float64,
    sizes: list[int] | None = None,
) -> dict[str, Tensor]:
    """Gradients of a fixed functional of all outputs and the final state, computed in pieces."""
    leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in (*inputs, state)]
    sizes = sizes or [inputs.x.shape[1]]
    final, outputs = leaves[5], []
    for piece in zip(*(leaf.split(sizes, dim=1) for leaf in leaves[:5]), strict=True):
        y, final = BACKENDS[backend](ScanInputs(*piece), final)
        outputs.append(y)
    randomness = generator(7)
    loss = torch.zeros((), dtype=dtype)
    for one in (torch.cat(outputs, dim=1), final):
        weights = torch.randn(one.shape, generator=randomness, dtype=torch.float64)
        loss = loss + (one * weights.to(dtype)).sum()
    found = torch.autograd.grad(loss, leaves)
    return dict(zip((*ScanInputs._fields, "state"), found, strict=True))


def assert_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    for name, tensor in wanted.items():
        assert_near(found[name].double(), tensor, tolerance, name)


@pytest.mark.parametrize("shape", [*SHAPES, *LONG], ids=str)
def test_every_compiled_library_gives_the_gradients_of_the_token_loop(
    library: ctypes.CDLL, shape: tuple[int, ...]
) -> None:
    inputs, state = draw(*shape)
    wanted = gradients(inputs, state, backend="reference")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        assert_gradients(gradients(inputs, state, dtype=dtype), wanted, tolerance)


@needs_kernels
def test_any_split_gives_the_same_gradients() -> None:
    inputs, state = draw(2, 700, 4, 3, 2, 5)
    wanted = gradients(inputs, state)
    randomness = torch.Generator().manual_seed(1)
    for _ in range(4):
        cuts = torch.randint(1, 699, (3,), generator=randomness).unique().tolist()
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, 700], strict=True)]
        assert_gradients(gradients(inputs, state, sizes=sizes), wanted, 1e-12)


@needs_kernels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", [1, 5, 8])
def test_the_number_of_threads_changes_gradients_by_rounding_only(heads: int) -> None:
    """Heads of one group are divided among threads, whose gradients of B and C are added."""
    inputs, state = draw(1, 300, heads, 16, 1, 32)
    torch.set_num_threads(1)
    wanted = gradients(inputs, state)
    for count in (2, 3, 4):
        torch.set_num_threads(count)
        assert_gradients(gradients(inputs, state), wanted, 1e-14)


@needs_kernels
def test_documents_that_begin_inside_a_row_have_their_own_gradients() -> None:
    """A log decay of −∞ removes what is before it: no gradient passes it, and none is NaN."""
    inputs, state = draw(2, 200, 4, 3, 2, 5)
    log_decay = inputs.log_decay.clone()
    log_decay[:, [0, 1, 63, 64, 130]] = -math.inf
    inputs = inputs._replace(log_decay=log_decay)
    wanted = gradients(inputs, state, backend="reference")
    found = gradients(inputs, state)
    assert_gradients(found, wanted, 1e-12)
    assert torch.equal(found["state"], torch.zeros_like(state))
    assert torch.equal(found["log_decay"][:, 63], torch.zeros(2, 4, dtype=torch.float64))


@needs_kernels
@pytest.mark.parametrize("strong", [-20.0, -200.0, -2000.0])
def test_slow_decays_keep_their_digits_after_strong_ones(strong: float) -> None:
    """Gradients of log decays in float32 are as accurate for the heads that forget nothing."""
    inputs, state = draw(1, 400, 3, 4, 1, 6)
    decay = torch.full_like(inputs.log_decay, -1e-4)
    decay[:, ::50] = strong
    decay[:, :, 2] = -1e-6  # a head that never forgets beside them
    decay[:, 20:, 0] = -50.0  # a head that forgets at once
    inputs = inputs._replace(log_decay=decay)
    wanted = gradients(inputs, state, backend="reference")
    found = gradients(inputs, state, dtype=torch.float32)
    assert_gradients(found, wanted, 3e-6)
    for head in range(3):
        exact = wanted["log_decay"][:, :, head]
        assert_near(found["log_decay"][:, :, head].double(), exact, 3e-6, f"head {head}")


@needs_kernels
def test_float32_gradients_of_a_long_memory_do_not_drift() -> None:
    """20,000 tokens whose decay never changes: at every distance as in float64."""
    inputs, state = draw(1, 20_000, 4, 2, 1, 3)
    decay = torch.tensor([0.0, -1e-7, -1e-4, -0.3], dtype=torch.float64)
    narrow = ScanInputs(
        *(one.float() for one in inputs._replace(log_decay=decay.expand(1, 20_000, 4)))
    )
    wanted = gradients(ScanInputs(*(one.double() for one in narrow)), state)
    found = gradients(narrow, state, dtype=torch.float32)
    for head in range(4):
        for name in ("x", "log_decay"):
            exact = wanted[name][:, :, head]
            assert_near(found[name][:, :, head].double(), exact, 1e-5, f"{name} of head {head}")


@needs_kernels
@pytest.mark.parametrize("output", [0, 1])
def test_an_output_without_a_gradient_adds_nothing(output: int) -> None:
    inputs, state = draw(1, 70, 2, 3, 1, 5)

    def found(backend: str) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, state)]
        loss = BACKENDS[backend](ScanInputs(*leaves[:5]), leaves[5])[output].square().sum()
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    for ours, theirs in zip(found("native"), found("reference"), strict=True):
        assert_near(ours, theirs, 1e-12, scale=1.0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_get_gradients_in_their_own_dtype(dtype: torch.dtype) -> None:
    """x, B and C of 16 bits are widened: their gradients are those of chunked, rounded once."""
    inputs, state = draw(1, 130, 4, 8, 2, 8)
    narrow = [tensor.to(dtype) for tensor in (inputs.x, inputs.B, inputs.C)]
    found = {}
    for backend in ("native", "chunked"):
        leaves = [one.clone().requires_grad_() for one in narrow]
        given = ScanInputs(leaves[0], inputs.gain.float(), inputs.log_decay.float(), *leaves[1:])
        y, _ = BACKENDS[backend](given, state.float())
        found[backend] = torch.autograd.grad(y.square().sum(), leaves)
    for ours, theirs in zip(found["native"], found["chunked"], strict=True):
        assert ours.dtype == dtype
        assert_near(ours.double(), theirs.double(), torch.finfo(dtype).eps)


@needs_kernels
def test_second_derivatives_are_those_of_the_token_loop() -> None:
    inputs, state = draw(1, 5, 2, 2, 1, 2)
    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, state)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return BACKENDS["native"](ScanInputs(*tensors[:5]), tensors[5])

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@needs_kernels
def test_torch_func_differentiates_the_recurrence() -> None:
    inputs, state = draw(1, 70, 2, 3, 1, 5)

    def loss(x: Tensor) -> Tensor:
        return BACKENDS["native"](inputs._replace(x=x), state)[0].square().sum()

    x = inputs.x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    assert_near(torch.func.grad(loss)(inputs.x), wanted, 1e-12)


@needs_kernels
@pytest.mark.parametrize("autocast", [False, True])
def test_rows_that_are_not_finite_change_no_gradient_of_other_rows(autocast: bool) -> None:
    wide, start = draw(3, 90, 4, 3, 2, 5)
    inputs, state = ScanInputs(*(tensor.float() for tensor in wide)), start.float()
    inputs.x[1, 40] = math.nan

    def run(rows: list[int], backend: str) -> tuple[Tensor, ...]:
        chosen = [tensor[rows].clone().requires_grad_() for tensor in (*inputs, state)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, _ = BACKENDS[backend](ScanInputs(*chosen[:5]), chosen[5])
        early = y.nan_to_num()
        return y, *torch.autograd.grad(early.square().sum(), chosen)

    together, alone = run([0, 1, 2], "native"), run([0, 2], "native")
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours[[0, 2]], theirs)
    assert together[0][1, 40:].isnan().any()
