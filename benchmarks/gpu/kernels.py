"""Part 3: each operation of a layer at the shapes of a long prefill."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench
from benchmarks.gpu.inputs import FAST, LIMIT, backends, projected, scan_operands
from benchmarks.gpu.sizes import Cost, nbytes, scan_flops
from benchmarks.gpu.timing import Call, backward_ms, forward_ms, kept_ms
from longrnn.ops import triton
from longrnn.ops.conv import causal_conv
from longrnn.ops.cross_entropy import weighted_cross_entropy
from longrnn.ops.norm import add_rms_norm, gated_rms_norm
from longrnn.ops.ssd import BACKENDS, ScanInputs
from longrnn.ops.ssd.rescale import rescaled_ssd
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry

# Largest ratios of the backend FAST to its plain recurrence that pass.
STATE_NORM, WINDOW = 1.4, 1.5
# Each product of a forward pass has two in the backward pass.
BACKWARD_PRODUCTS = 2


def run(bench: Bench) -> None:
    """Times the operations of one layer, and the head with its loss."""
    # The one that the limits are for comes first.
    for name in sorted(backends(bench), key=lambda name: name != FAST):
        bench.attempt(f"{name}, recurrence", partial(_recurrence, bench, name), seconds=5)
    for name, work in (("convolution", _convolution), ("norms", _norms), ("head", _head)):
        bench.attempt(name, partial(work, bench), seconds=5)
    bench.attempt("projections", partial(_projections, bench), seconds=3)


def recurrence_cost(inputs: ScanInputs, state: Tensor, *, back: bool = False) -> Cost:
    """What the recurrence reads and writes once; its output is in the dtype of the state.

    The backward pass reads inputs, initial state and the gradients of both outputs, and writes the
    gradients of all tensors.
    """
    _, tokens, heads, head_dim = inputs.x.shape
    flops = scan_flops(tokens, heads, head_dim, state.shape[-1], inputs.B.shape[2])
    given, y = nbytes([*inputs, state]), inputs.x.numel() * state.element_size()
    outputs = y + nbytes([state])
    if back:
        return Cost(2 * given + outputs, BACKWARD_PRODUCTS * flops)
    return Cost(given + outputs, flops)


def _recurrence(bench: Bench, name: str) -> None:
    """Forward, backward, and the two mitigations that are recurrences of their own."""
    inputs, state = scan_operands(bench)
    tensors = [*inputs, state]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return BACKENDS[name](ScanInputs(*tensors[:-1]), tensors[-1])

    cost = recurrence_cost(inputs, state)
    plain = forward_ms(bench, call, tensors)
    bench.figure(f"{name}, recurrence, forward", plain, "ms", cost=cost)
    # Before the backward pass: an error there does not hide these two.
    with torch.no_grad():
        _mitigated(bench, name, inputs, state, plain)
    kept = kept_ms(bench, call, tensors)
    bench.figure(f"{name}, recurrence, forward with gradients", kept, "ms")
    cost = recurrence_cost(inputs, state, back=True)
    backward = backward_ms(bench, call, tensors)
    bench.figure(f"{name}, recurrence, backward", backward, "ms", cost=cost)
    if name == FAST:  # in torch operators this takes seconds
        _limited_backward(bench, name, inputs, state, backward)


def _mitigated(
    bench: Bench, name: str, inputs: ScanInputs, state: Tensor, plain: float | None
) -> None:
    """The limited and the windowed recurrence, relative to the plain one."""
    sizes, against = bench.sizes, f"{name}, plain"
    limits = torch.full((sizes.heads,), LIMIT, dtype=torch.float64, device=bench.device)
    # In plain torch these take seconds, and a few thousand tokens show the ratio.
    share = 1 if name == FAST else 16
    part = inputs.slice(0, sizes.tokens // share)
    shorter = None if plain is None else plain / share
    ms = bench.milliseconds(lambda: rescaled_ssd(part, state, limits, BACKENDS[name]))
    limit = STATE_NORM if name == FAST else None
    what = f"{name}, state_norm, {part.x.shape[1]:,} tokens"
    bench.compare(what, ms, shorter, against, limit=limit)
    if name not in ("chunked", FAST):
        return  # the window has no other implementation
    one = ScanInputs(*(tensor[0, :1] for tensor in part))
    carry = init_carry(one, state, sizes.window)
    ms = bench.milliseconds(lambda: windowed_ssd(part, carry, sizes.window, BACKENDS[name]))
    limit = WINDOW if name == FAST else None
    what = f"{name}, window of {sizes.window:,}, {part.x.shape[1]:,} tokens"
    bench.compare(what, ms, shorter, against, limit=limit)


def _limited_backward(
    bench: Bench, name: str, inputs: ScanInputs, state: Tensor, plain: float | None
) -> None:
    """The backward pass of the limited recurrence, relative to the plain one."""
    limits = torch.full((bench.sizes.heads,), LIMIT, dtype=torch.float64, device=bench.device)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return rescaled_ssd(ScanInputs(*tensors[:-1]), tensors[-1], limits, BACKENDS[name])

    ms = backward_ms(bench, call, [*inputs, state])
    bench.compare(f"{name}, state_norm, backward", ms, plain, f"{name}, plain")


def _time_operation(
    bench: Bench, name: str, call: Call, tensors: list[Tensor], *, back: int | None = None
) -> None:
    """Records forward and backward of an operation, beside it in plain torch.

    Args:
        bench: the part.
        name: of the operation.
        call: of the tensors and `fused`, whether a Triton kernel computes it.
        tensors: its arguments.
        back: bytes that the backward pass moves; by default it reads the arguments and the
            gradients of the outputs, and writes gradients of the arguments.
    """
    fused, plain = (partial(call, fused=one) for one in (triton.available(), False))
    with torch.no_grad():
        outputs = nbytes(plain(*tensors))
    given = nbytes(tensors)
    back = 2 * given + outputs if back is None else back
    passes = (("forward", forward_ms, given + outputs), ("backward", backward_ms, back))
    for which, measure, moved in passes:
        ms, other = (measure(bench, one, tensors) for one in (fused, plain))
        bench.compare(f"{name}, {which}", ms, other, "plain torch", cost=Cost(moved))


def _convolution(bench: Bench) -> None:
    sizes, device = bench.sizes, bench.device
    wide = projected(sizes, sizes.tokens, device, torch.bfloat16)
    x = wide[..., sizes.d_inner : sizes.d_inner + sizes.d_conv_input]
    weight = torch.randn(sizes.d_conv_input, 4, device=device)
    bias = torch.randn(sizes.d_conv_input, device=device)
    state = torch.randn(1, 3, sizes.d_conv_input, device=device).bfloat16()

    def call(x: Tensor, weight: Tensor, bias: Tensor, *, fused: bool) -> tuple[Tensor, ...]:
        return causal_conv(x, weight, bias, state, activation=True, fused=fused)[:1]

    _time_operation(bench, "convolution with SiLU", call, [x, weight, bias])


def _norms(bench: Bench) -> None:
    """The norm after the recurrence, and the sum and the norm before the next layer."""
    sizes, device = bench.sizes, bench.device

    def draw(width: int) -> Tensor:
        return torch.randn(1, sizes.tokens, width, device=device).bfloat16()

    def gated(y: Tensor, z: Tensor, weight: Tensor, *, fused: bool) -> tuple[Tensor, ...]:
        return (gated_rms_norm(y, z, weight, 1e-5, 1, fused=fused),)

    def added(x: Tensor, branch: Tensor, weight: Tensor, *, fused: bool) -> tuple[Tensor, ...]:
        return add_rms_norm(x, branch, weight, 1e-5, dtype=branch.dtype, fused=fused)

    weight = torch.randn(sizes.d_inner, device=device)
    _time_operation(
        bench, "gated RMSNorm", gated, [draw(sizes.d_inner), draw(sizes.d_inner), weight]
    )
    # As in training under autocast: the stream is float32, branch and norm are bfloat16.
    branch, narrow = draw(sizes.d_model), weight[: sizes.d_model]
    x = torch.randn(branch.shape, device=device)
    # The sum and two gradients are read, and two gradients are written.
    back = 3 * nbytes([x]) + 2 * nbytes([branch])
    _time_operation(bench, "residual + RMSNorm", added, [x, branch, narrow], back=back)


def _head(bench: Bench) -> None:
    """Loss and both gradients of the head, which one call computes."""
    sizes, device = bench.sizes, bench.device
    hidden = torch.randn(sizes.tokens, sizes.d_model, device=device).bfloat16().requires_grad_()
    head = torch.randn(sizes.vocab_size, sizes.d_model, device=device).mul_(0.02).requires_grad_()
    targets = torch.randint(sizes.vocab_size, (sizes.tokens,), device=device)
    weights = torch.full((sizes.tokens,), 1 / sizes.tokens, device=device)

    def call(fused: bool) -> object:
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = weighted_cross_entropy(hidden, head, targets, weights, fused=fused)
        return torch.autograd.grad(loss, (hidden, head))

    flops = 3 * 2.0 * sizes.tokens * sizes.d_model * sizes.vocab_size
    cost = Cost(nbytes([hidden, hidden, head, head]), flops)
    fused = triton.available()
    plain, ms = (bench.milliseconds(lambda one=one: call(one)) for one in (False, fused))
    bench.compare("head, loss and gradients", ms, plain, "plain torch", cost=cost)
    bench.reset_peak()
    call(fused)
    bench.figure("head, loss and gradients, peak memory", bench.peak_gib(), "GiB")


def _projections(bench: Bench) -> None:
    """The two matrix products of a layer, which no kernel here replaces."""
    sizes, device = bench.sizes, bench.device
    x = torch.randn(sizes.tokens, sizes.d_model, device=device).bfloat16()
    y = torch.randn(sizes.tokens, sizes.d_inner, device=device).bfloat16()
    width = sizes.d_inner + sizes.d_conv_input + sizes.heads
    first = torch.randn(width, sizes.d_model, device=device).bfloat16()
    second = torch.randn(sizes.d_model, sizes.d_inner, device=device).bfloat16()
    ms = bench.milliseconds(lambda: (x @ first.t(), y @ second.t()))
    flops = 2.0 * sizes.tokens * sizes.d_model * (width + sizes.d_inner)
    moved = nbytes([x, y, first, second]) + 2 * sizes.tokens * (width + sizes.d_model)
    bench.figure("both projections, forward", ms, "ms", cost=Cost(moved, flops))
