"""Every backend of the recurrence equals an independent loop over tokens."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops.ssd import BACKENDS, ScanInputs, resolve
from longrnn.ops.triton import interpreting
from tests.contracts.builders import DTYPES, TOLERANCE, assert_near, generator, spec_id

pytestmark = pytest.mark.core

every_backend = pytest.mark.parametrize("backend", list(BACKENDS))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)


def loop(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence in float64, token by token."""
    x, gain, log_decay, B, C = (tensor.double() for tensor in inputs)
    x = x * gain[..., None]
    heads, groups = x.shape[2], B.shape[2]
    group_of_head = [head // (heads // groups) for head in range(heads)]
    h, y = state.double(), []
    for t in range(x.shape[1]):
        kept = torch.exp(log_decay[:, t])[:, :, None, None] * h
        h = kept + torch.einsum("bhp,bhn->bhpn", x[:, t], B[:, t, group_of_head])
        y.append(torch.einsum("bhpn,bhn->bhp", h, C[:, t, group_of_head]))
    return torch.stack(y, 1), h


def wide_decay(shape: tuple[int, ...], randomness: torch.Generator) -> Tensor:
    """From hardly any forgetting to exp(-30) per token."""
    return -30 * torch.rand(shape, generator=randomness, dtype=torch.float64) ** 8


def one_strong_then_slow(shape: tuple[int, ...], randomness: torch.Generator) -> Tensor:
    """Every 50th token forgets all, the others almost nothing; these must stay accurate."""
    decay = -1e-4 * torch.rand(shape, generator=randomness, dtype=torch.float64)
    decay[:, ::50] = -2000.0
    return decay


def no_decay(shape: tuple[int, ...], randomness: torch.Generator) -> Tensor:
    """A sum of everything."""
    return torch.zeros(shape, dtype=torch.float64)


DECAYS = [wide_decay, one_strong_then_slow, no_decay]
every_decay = pytest.mark.parametrize("decay", DECAYS, ids=lambda decay: decay.__name__)


def draw(
    time: int,
    dtype: torch.dtype = torch.float64,
    decay=wide_decay,
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    seed: int = 0,
) -> tuple[ScanInputs, Tensor]:
    """Inputs and a state that is not zero; head_dim 3 and d_state 5, which are unlike the rest."""
    randomness = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=randomness, dtype=torch.float64).to(dtype)

    x, gain = normal(batch, time, heads, 3), normal(batch, time, heads)
    log_decay = decay((batch, time, heads), randomness).to(dtype)
    B, C = normal(batch, time, groups, 5), normal(batch, time, groups, 5)
    return ScanInputs(x, gain, log_decay, B, C), normal(batch, heads, 3, 5)


def outcome(function, inputs: ScanInputs, state: Tensor) -> dict[str, Tensor]:
    """Outputs, final state, and the gradients of a random functional of both."""
    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, state)]
    y, final = function(ScanInputs(*leaves[:5]), leaves[5])
    randomness = generator(7)
    loss = sum(
        (
            (out * torch.randn(out.shape, generator=randomness, dtype=torch.float64)).sum()
            for out in (y, final)
        ),
        torch.zeros((), dtype=torch.float64),
    )
    names = [f"gradient of {name}" for name in (*ScanInputs._fields, "state")]
    return {"y": y, "final": final} | dict(
        zip(names, torch.autograd.grad(loss, leaves), strict=True)
    )


def assert_as_the_loop(backend: str, inputs: ScanInputs, state: Tensor) -> None:
    wide = ScanInputs(*(tensor.double() for tensor in inputs))
    expected = outcome(loop, wide, state.double())
    actual = outcome(BACKENDS[backend], inputs, state)
    for name, tensor in expected.items():
        assert actual[name].dtype == state.dtype, name
        assert_near(actual[name], tensor, TOLERANCE[state.dtype], name)


@every_backend
@every_dtype
@every_decay
@pytest.mark.parametrize("time", [1, 2, 3, 63, 64, 65, 131])
def test_every_length_equals_the_loop(backend: str, dtype: torch.dtype, decay, time: int) -> None:
    """One token, odd lengths and the edges of a chunk, over every kind of forgetting."""
    assert_as_the_loop(backend, *draw(time, dtype, decay))


@every_backend
@every_dtype
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 1), (4, 4), (6, 3)])
def test_groups(backend: str, dtype: torch.dtype, heads: int, groups: int) -> None:
    """Head i reads B and C of group i // (h / g)."""
    assert_as_the_loop(backend, *draw(70, dtype, batch=1, heads=heads, groups=groups))


@every_backend
@settings(max_examples=12)
@given(
    time=st.integers(1, 40),
    chunk=st.sampled_from([1, 2, 4, 7]),
    chunks=st.sampled_from([1, 2, 3]),
    decay=st.sampled_from(DECAYS),
    seed=st.integers(0, 10**6),
)
def test_small_chunks(backend: str, time: int, chunk: int, chunks: int, decay, seed: int) -> None:
    """Lengths around the edges of chunks and segments, both made small."""
    module = sys.modules[BACKENDS[backend].__module__]
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("CHUNK", chunk), ("SEGMENT", chunk * chunks)):
            if hasattr(module, name):
                patch.setattr(module, name, size)
        assert_as_the_loop(backend, *draw(time, decay=decay, seed=seed))


@every_backend
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_edge_of_a_segment(backend: str, off: int) -> None:
    """The sizes in use, at the length where a second segment begins."""
    module = sys.modules[BACKENDS[backend].__module__]
    inputs, state = draw(getattr(module, "SEGMENT", 1024) + off, batch=1, heads=2)
    expected = loop(inputs, state)
    for ours, theirs in zip(BACKENDS[backend](inputs, state), expected, strict=True):
        assert_near(ours, theirs, 1e-10)


@pytest.fixture(scope="module")
def long_run() -> tuple[ScanInputs, Tensor, Tensor, Tensor]:
    """20,000 tokens in float32 and their float64 answer; one head forgets, one is slow."""

    def decay(shape: tuple[int, ...], randomness: torch.Generator) -> Tensor:
        both = wide_decay(shape, randomness)
        # The slowest decays of a new Mamba-2 (dt_min · A_min = 1e-3), different for each token.
        # A float32 loop rounds exp(log_decay) at every token: slower ones would cost it more.
        both[..., 1] = -1e-3 * (0.5 + torch.rand(shape[:2], generator=randomness))
        return both

    inputs, state = draw(20_000, torch.float32, decay, batch=1, heads=2, groups=1)
    return inputs, state, *loop(inputs, state)


@every_backend
def test_long_float32(backend: str, long_run: tuple[ScanInputs, Tensor, Tensor, Tensor]) -> None:
    """Rounding does not add up over a long input."""
    inputs, state, y, final = long_run
    ours_y, ours_final = BACKENDS[backend](inputs, state)
    for head in range(2):
        assert_near(ours_y[:, :, head], y[:, :, head], 1e-5, f"head {head}")
        assert_near(ours_final[:, head], final[:, head], 1e-5, f"head {head}")


# The decay of each head in the test below, from a sum of everything to a short memory.
STEADY = [0.0, -1e-7, -1e-5, -1e-4, -1e-3, -0.1, -0.6, -0.8, -3.0, -200.0]


@pytest.fixture(scope="module")
def steady_run() -> tuple[ScanInputs, Tensor, Tensor, Tensor]:
    """20,000 tokens in float32 whose decay never changes, and their float64 answer."""

    def decay(shape: tuple[int, ...], randomness: torch.Generator) -> Tensor:
        return torch.tensor(STEADY, dtype=torch.float64).expand(shape)

    inputs, state = draw(20_000, torch.float32, decay, batch=1, heads=len(STEADY), groups=1)
    return inputs, state, *loop(inputs, state)


@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"reference"}))
@pytest.mark.parametrize("size", [1, 3, 64])
def test_pieces_in_float32(
    backend: str, size: int, steady_run: tuple[ScanInputs, Tensor, Tensor, Tensor]
) -> None:
    """Decoding one token at a time drifts no more than one call."""
    inputs, state, y, final = steady_run
    if backend == "triton" and interpreting() and size < 64:
        # 20,000 tokens one at a time would take ten minutes in Triton's interpreter.
        inputs = inputs.slice(0, 600)
        y, final = loop(inputs, state)
    outputs = []
    for piece in zip(*(tensor.split(size, dim=1) for tensor in inputs), strict=True):
        y_piece, state = BACKENDS[backend](ScanInputs(*piece), state)
        outputs.append(y_piece)
    ours = torch.cat(outputs, dim=1)
    for head, log_decay in enumerate(STEADY):
        assert_near(ours[:, :, head], y[:, :, head], 1e-5, f"y at {log_decay}")
        assert_near(state[:, head], final[:, head], 1e-5, f"state at {log_decay}")


@every_backend
@pytest.mark.parametrize("time", [1, 70])
def test_state_stays_wide(backend: str, time: int) -> None:
    """bfloat16 inputs: state and output keep the state's dtype and its digits."""
    inputs, state = draw(time, torch.float32)
    x, gain, log_decay, B, C = inputs
    inputs = ScanInputs(x.bfloat16(), gain, log_decay, B.bfloat16(), C.bfloat16())
    for ours, exact in zip(BACKENDS[backend](inputs, state), loop(inputs, state), strict=True):
        assert ours.dtype == torch.float32
        assert_near(ours, exact, 1e-5)


@every_backend
@pytest.mark.parametrize("time", [1, 2, 70])
def test_arguments_are_kept(backend: str, time: int) -> None:
    """Neither the inputs nor the state that is passed in is written to."""
    inputs, state = draw(time)
    before = [tensor.clone() for tensor in (*inputs, state)]
    BACKENDS[backend](inputs, state)
    assert all(torch.equal(*pair) for pair in zip(before, (*inputs, state), strict=True))


def test_resolve() -> None:
    """`auto` is a backend that exists; an unknown name is refused with the nearest one."""
    assert resolve("auto") in BACKENDS
    assert all(resolve(name) == name for name in BACKENDS)
    with pytest.raises(UserError, match="chunked"):
        resolve("chunkd")


@every_backend
@pytest.mark.parametrize("log_decay", [0.0, -0.69, -0.7, -79.0, -1e4, -torch.inf])
def test_one_token_of_any_decay(backend: str, log_decay: float) -> None:
    """Values and gradients equal the loop at decays where the implementation changes."""
    inputs, state = draw(1)
    inputs = inputs._replace(log_decay=torch.full_like(inputs.log_decay, log_decay))
    assert_as_the_loop(backend, inputs, state)


@every_backend
def test_a_decay_to_nothing(backend: str) -> None:
    """A log decay of −∞ removes everything before it and gives no NaN."""
    generator = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(1, 70, 1, 3, generator=generator) for _ in range(3))
    gain, log_decay = torch.ones(1, 70, 1), torch.full((1, 70, 1), -0.01)
    log_decay[:, [5, 66]] = -torch.inf
    _, after = BACKENDS[backend](ScanInputs(x, gain, log_decay, B, C), torch.ones(1, 1, 3, 3))
    late = ScanInputs(*(tensor[:, 66:] for tensor in (x, gain, log_decay, B, C)))
    _, expected = BACKENDS[backend](late, torch.zeros(1, 1, 3, 3))
    torch.testing.assert_close(after, expected)
