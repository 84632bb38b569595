"""Scan and delta rule with decays per head or per key, against a loop over tokens in float64."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrnn.ops.repeat import repeated
from longrnn.ops.scan import DELTA, SCAN
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.window import initial_recent, state_of
from tests.backends.test_operations import assert_near, inputs_from, results, tensors_of
from tests.contracts.subjects import BACKENDS

# The place of `Decay.keep` in `ScanInputs.tensors`, which has no gradient in kernels.
KEEP = 4
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
OPERATIONS = {"scan": SCAN, "delta": DELTA}
# What is compared with one result of the definition.
WAYS = list(product(BACKENDS, TOLERANCE))
every_operation = pytest.mark.parametrize("operation", OPERATIONS)
every_decay = pytest.mark.parametrize("per_key", [True, False], ids=["per key", "per head"])
every_rate = pytest.mark.parametrize("with_keep", [False, True], ids=["rates", "rates and factors"])
every_start = pytest.mark.parametrize(
    "starts", [False, True], ids=["one document", "document starts"]
)


class Sizes(NamedTuple):
    rows: int
    tokens: int
    heads: int
    channels: int
    groups: int
    keys: int


SIZES = [
    Sizes(2, 1, 2, 3, 1, 5),
    Sizes(1, 3, 4, 2, 2, 3),
    Sizes(2, 67, 2, 4, 2, 7),
    Sizes(1, 100, 3, 16, 1, 8),
    Sizes(2, 300, 4, 5, 2, 6),
    Sizes(2, 67, 6, 1, 2, 4),  # heads of one channel, as in Mamba-1
    Sizes(1, 67, 300, 1, 300, 1),  # one entry per head, as in an RG-LRU
    Sizes(1, 40, 3, 2, 1, 40),  # more keys than a vector of the kernel has lanes
]
# Heads of one channel, whose number is not a multiple of a vector's width; and of two channels.
CHANNELS = [
    Sizes(2, 70, 37, 1, 1, 5),
    Sizes(1, 33, 48, 1, 2, 16),
    Sizes(3, 1, 5, 1, 1, 3),
    Sizes(2, 100, 6, 1, 3, 4),
    Sizes(2, 67, 4, 2, 2, 3),
]


def drawn(
    sizes: Sizes, operation: str, *, per_key: bool, starts: bool, seed: int = 0
) -> tuple[ScanInputs, Tensor]:
    """Random numbers of float32, in float64; log decays are from −1e4 to exactly 0."""
    b, t, h, p, g, n = sizes
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
    shape = (b, t, h, n) if per_key else (b, t, h)
    log_decay = -(10 ** (14 * uniform(*shape) - 10))
    log_decay = log_decay.masked_fill(uniform(*shape) < 0.2, 0.0)
    if starts:
        log_decay[:, :: max(1, t // 3)] = -torch.inf
    x, gain, B, C = (
        normal(b, t, h, p),
        normal(b, t, h).abs(),
        normal(b, t, g, n),
        normal(b, t, g, n),
    )
    if operation == "delta":
        gain, B = gain.clamp(max=2.0), B / B.norm(dim=-1, keepdim=True)
    inputs, state = inputs_from(x, gain, log_decay, B, C), normal(b, h, p, n)
    return inputs.to(torch.float32).to(torch.float64), state.float().double()


def with_rates(inputs: ScanInputs, *, with_keep: bool) -> ScanInputs:
    """Inputs whose steps are the negative log decays, and whose keys have rates of their own."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heads, keys = inputs.x.shape[2], inputs.B.shape[3]
    rate = -normal(heads, keys).exp().float().double()
    keep = (-0.01 * normal(*inputs.gain.shape).abs()).exp() if with_keep else None
    return inputs._replace(decay=Decay(-inputs.decay.step, rate, keep))


def by_token(
    operation: str, inputs: ScanInputs, state: Tensor, limit: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, in float64: decay, then the delta rule or a sum, then the limit."""
    x, gain, log_decay, B, C = tensors_of(inputs.to(torch.float64))
    state, heads = state.double(), x.shape[2]
    decay = (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
    outputs = []
    for i in range(x.shape[1]):
        k, q = (tensor[:, i].repeat_interleave(heads // tensor.shape[2], 1) for tensor in (B, C))
        state = state * decay[:, i, :, None, :]
        target = x[:, i]
        if operation == "delta":
            target = target - torch.einsum("bhpn,bhn->bhp", state, k)
        state = state + torch.einsum("bh,bhp,bhn->bhpn", gain[:, i], target, k)
        if limit is not None:
            norm = state.flatten(2).norm(dim=-1)[..., None, None]
            highest = limit.clamp(max=1e30)[:, None, None]
            state = torch.where(norm > highest, state * (highest / norm), state)
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, q))
    return torch.stack(outputs, 1), state


def gradients_of(run: Callable[..., Any], inputs: ScanInputs, state: Tensor) -> list[Tensor]:
    """Outputs, final state, and the gradients of all inputs but `keep`, and of the state."""
    tensors = inputs.tensors()
    places = [i for i, one in enumerate(tensors) if one is not None and i != KEEP]

    def call(*given: Tensor) -> Any:
        filled = tensors.copy()
        for place, tensor in zip(places, given, strict=False):
            filled[place] = tensor
        return run(ScanInputs.of(filled), given[-1])

    given = [tensors[place] for place in places]
    return results(call, *given, state, gradients=True)  # type: ignore[arg-type]


@every_start
@every_decay
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@every_operation
def test_results_and_gradients_are_those_of_the_definition(
    operation: str, sizes: Sizes, per_key: bool, starts: bool
) -> None:
    """With gradients and without, by every backend in every dtype, also at a split."""
    inputs, state = drawn(sizes, operation, per_key=per_key, starts=starts)
    assert_computed(operation, inputs, state)


@every_start
@every_rate
@pytest.mark.parametrize("sizes", CHANNELS, ids=str)
@every_operation
def test_rates_per_key_are_those_of_their_log_decays(
    operation: str, sizes: Sizes, with_keep: bool, starts: bool
) -> None:
    inputs, state = drawn(sizes, operation, per_key=False, starts=starts)
    assert_computed(operation, with_rates(inputs, with_keep=with_keep), state)


def assert_computed(operation: str, inputs: ScanInputs, state: Tensor) -> None:
    exact = gradients_of(partial(by_token, operation), inputs, state)
    tokens = inputs.x.shape[1]
    middle = tokens // 2
    for backend, dtype in WAYS:
        run, given, start = OPERATIONS[operation].bound(backend), inputs.to(dtype), state.to(dtype)
        near = partial(assert_near, tolerance=TOLERANCE[dtype], how=(backend, dtype))
        near(gradients_of(run, given, start), exact)
        near(run(given, start), exact[:2])
        zero, _ = run(given, torch.zeros_like(start))
        near([run(given, final=False)[0]], [zero])
        if middle:
            first, between = run(given.slice(0, middle), start)
            rest, after = run(given.slice(middle, tokens), between)
            near([torch.cat([first, rest], 1), after], exact[:2])


every_kind = pytest.mark.parametrize("decay", ["per key", "per head", "rates"])


@every_kind
@pytest.mark.parametrize("sizes", [SIZES[2]._replace(heads=4), SIZES[5]], ids=str)
@every_operation
def test_a_limit_rescales_the_state_after_every_token(
    operation: str, sizes: Sizes, decay: str
) -> None:
    inputs, state = drawn(sizes, operation, per_key=decay == "per key", starts=False)
    inputs = with_rates(inputs, with_keep=True) if decay == "rates" else inputs
    limits = torch.tensor([0.01, 3.0, 1e9, torch.inf, 0.02, 1.0][: sizes.heads]).double()
    limited = OPERATIONS[operation].limited
    assert limited is not None
    exact = gradients_of(partial(by_token, operation, limit=limits), inputs, state)
    for backend, dtype in WAYS:
        run, given, start = limited.bound(backend), inputs.to(dtype), state.to(dtype)
        ours = gradients_of(lambda *both, run=run: run(*both, limits), given, start)
        assert_near(ours, exact, 10 * TOLERANCE[dtype], (backend, dtype))
        assert_near(run(given, start, limits), exact[:2], TOLERANCE[dtype], (backend, dtype))


@every_kind
@pytest.mark.parametrize(("window", "starts"), [(1, False), (40, True), (64, False), (1000, True)])
@pytest.mark.parametrize("sizes", [SIZES[2], SIZES[5]], ids=str)
def test_a_window_is_a_sum_over_the_last_tokens_at_any_split(
    sizes: Sizes, window: int, starts: bool, decay: str
) -> None:
    inputs, state = drawn(sizes, "scan", per_key=decay == "per key", starts=starts)
    inputs = with_rates(inputs, with_keep=False) if decay == "rates" else inputs
    time = sizes.tokens

    def exact(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, log_decay, B, C = tensors_of(inputs)
        decay = (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
        terms, outputs, memory = x.new_zeros(0, *state.shape), [], state
        for i in range(time):
            k, q = (one[:, i].repeat_interleave(sizes.heads // sizes.groups, 1) for one in (B, C))
            added = torch.einsum("bh,bhp,bhn->bhpn", gain[:, i], x[:, i], k)
            terms = torch.cat([terms * decay[:, i, :, None], added[None]])[-window:]
            memory = terms.sum(0)
            outputs.append(torch.einsum("bhpn,bhn->bhp", memory, q))
        return torch.stack(outputs, 1), memory

    def ours(
        inputs: ScanInputs, state: Tensor, *, backend: str, lengths: Sequence[int] = (time,)
    ) -> tuple[Tensor, Tensor]:
        recent, outputs, start = initial_recent(inputs, sizes.rows), [], 0
        assert SCAN.windowed is not None
        for length in lengths:
            part = inputs.slice(start, start + length)
            y, recent = SCAN.windowed(backend, part, recent, window)
            outputs.append(y)
            start += length
        return torch.cat(outputs, 1), state_of(recent, inputs)

    wanted = gradients_of(exact, inputs, state)
    for backend, dtype in WAYS:
        run, given, start = partial(ours, backend=backend), inputs.to(dtype), state.to(dtype)
        near = partial(assert_near, tolerance=TOLERANCE[dtype], how=(backend, dtype))
        near(gradients_of(run, given, start), wanted)
        for lengths in ([1] * time, [20, 1, 1, 30, time - 52]):
            near(run(given, start, lengths=lengths), wanted[:2])


@every_decay
def test_repetition_equals_reading_the_tokens_again(per_key: bool) -> None:
    inputs, before = drawn(SIZES[2], "scan", per_key=per_key, starts=False)
    _, after = by_token("scan", inputs, before)
    total = inputs.decay.total()
    exact = before
    for _ in range(5):
        _, exact = by_token("scan", inputs, exact)
    found = repeated(before, after, total, torch.tensor([5, 1]))
    assert_near([found[0], found[1]], [exact[0], after[1]], 1e-10)


@every_operation
@pytest.mark.parametrize("sizes", [Sizes(1, 3, 2, 2, 1, 2), Sizes(1, 3, 2, 1, 1, 2)], ids=str)
def test_torch_differentiates_twice_and_forward(operation: str, sizes: Sizes) -> None:
    inputs, state = drawn(sizes, operation, per_key=True, starts=False)
    inputs = inputs._replace(decay=Decay(inputs.decay.log().clamp(-2.0, -0.01)))
    tensors = [tensor.requires_grad_() for tensor in (*tensors_of(inputs), state)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return OPERATIONS[operation]("torch", inputs_from(*tensors[:5]), tensors[5])

    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)
    values, tangents = tuple(tensors), tuple(torch.ones_like(tensor) for tensor in tensors)
    forward = torch.func.jvp(run, values, tangents)[1]
    _, reverse = torch.autograd.functional.jvp(run, values, tangents)
    assert_near([*forward], [*reverse], 1e-10)


@given(
    sizes=st.builds(
        Sizes, *(st.integers(1, most) for most in (2, 70, 4, 5)), st.just(1), st.integers(1, 20)
    ),
    operation=st.sampled_from(sorted(OPERATIONS)),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=25, deadline=None)
def test_any_sizes_and_decays_are_computed(sizes: Sizes, operation: str, seed: int) -> None:
    inputs, state = drawn(sizes, operation, per_key=True, starts=seed % 3 == 0, seed=seed)
    exact = [*by_token(operation, inputs, state)]
    for backend, dtype in WAYS:
        ours = OPERATIONS[operation](backend, inputs.to(dtype), state.to(dtype))
        assert_near(ours, exact, TOLERANCE[dtype], (backend, dtype))
