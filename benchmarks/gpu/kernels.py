"""Part 3: each operation of a layer at the shapes of a long prefill, beside mamba-ssm's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench
from benchmarks.gpu.inputs import backends, projected, scan_inputs
from benchmarks.gpu.peers import peer_scan
from benchmarks.gpu.sizes import Cost, nbytes, scan_flops
from longrnn.ops.conv import causal_conv
from longrnn.ops.cross_entropy import weighted_cross_entropy
from longrnn.ops.norm import gated_rms_norm, rms_norm
from longrnn.ops.ssd import BACKENDS, ScanInputs
from longrnn.ops.ssd.rescale import rescaled_ssd
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry

# Largest ratios that pass, of the backend FAST: to mamba-ssm, and to the plain recurrence.
FAST = "triton"
FORWARD, BACKWARD, STATE_NORM, WINDOW = 1.3, 1.6, 1.4, 1.5
# Each product of a forward pass has two in the backward pass.
BACKWARD_PRODUCTS = 2
# Norm of a state that the random inputs reach.
LIMIT = 4.0


def run(bench: Bench) -> None:
    """Times the operations of one layer, and the head with its loss."""
    peer: dict[str, float | None] = {"forward": None, "backward": None}
    bench.attempt("mamba_ssm", partial(_peer, bench, peer), seconds=5)
    for name in backends(bench.device):
        bench.attempt(f"{name}, recurrence", partial(_recurrence, bench, name, peer), seconds=5)
    for name, work in (("convolution", _convolution), ("norms", _norms), ("head", _head)):
        bench.attempt(name, partial(work, bench), seconds=5)
    bench.attempt("projections", partial(_projections, bench), seconds=3)


def _inputs(bench: Bench) -> tuple[ScanInputs, Tensor]:
    sizes = bench.sizes
    return scan_inputs(sizes, projected(sizes, sizes.tokens, bench.device, torch.bfloat16))


def _forward_and_backward(
    bench: Bench, call: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor]
) -> tuple[float | None, float | None, float | None]:
    """Milliseconds of a call without gradients, of one with, and of its backward pass."""
    with torch.no_grad():
        plain = bench.milliseconds(lambda: call(*tensors))
        # Dense gradients: those of a sum would be views of one number, which kernels copy first.
        grads = [torch.randn_like(out) for out in call(*tensors)]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    kept = bench.milliseconds(lambda: call(*leaves))
    both = bench.milliseconds(lambda: torch.autograd.grad(call(*leaves), leaves, grads))
    backward = None if kept is None or both is None else both - kept
    return plain, kept, backward


def _peer(bench: Bench, found: dict[str, float | None]) -> None:
    """The recurrence of mamba-ssm, which the others are compared with."""
    call = peer_scan(bench.device)
    if isinstance(call, str):
        bench.skip("mamba_ssm, recurrence", call)
        return
    inputs, state = _inputs(bench)
    plain, _, backward = _forward_and_backward(bench, call, [*inputs, state])
    bench.figure("mamba_ssm, recurrence, forward", plain, "ms", cost=_cost(inputs, state))
    bench.figure("mamba_ssm, recurrence, backward", backward, "ms")
    found.update(forward=plain, backward=backward)


def _cost(inputs: ScanInputs, state: Tensor, *, backward: bool = False) -> Cost:
    """Inputs are read once, and outputs written once; the backward pass does both again."""
    _, tokens, heads, head_dim = inputs.x.shape
    flops = scan_flops(tokens, heads, head_dim, state.shape[-1], inputs.B.shape[2])
    moved = nbytes([*inputs, inputs.x, state, state])
    # It reads inputs and the gradient of the output, and writes a gradient for each input.
    return Cost(2 * moved, BACKWARD_PRODUCTS * flops) if backward else Cost(moved, flops)


def _recurrence(bench: Bench, name: str, peer: dict[str, float | None]) -> None:
    """Forward, backward, and the two mitigations that are recurrences of their own."""
    inputs, state = _inputs(bench)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return BACKENDS[name](ScanInputs(*tensors[:-1]), tensors[-1])

    plain, kept, backward = _forward_and_backward(bench, call, [*inputs, state])
    is_fast = name == FAST
    bench.compare(
        f"{name}, recurrence, forward",
        plain,
        peer["forward"],
        "mamba_ssm",
        cost=_cost(inputs, state),
        limit=FORWARD if is_fast else None,
    )
    bench.figure(f"{name}, recurrence, forward with gradients", kept, "ms")
    bench.compare(
        f"{name}, recurrence, backward",
        backward,
        peer["backward"],
        "mamba_ssm",
        cost=_cost(inputs, state, backward=True),
        limit=BACKWARD if is_fast else None,
    )
    with torch.no_grad():
        _mitigated(bench, name, inputs, state, plain)
    if is_fast:  # in torch operators this takes seconds
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

    _, _, backward = _forward_and_backward(bench, call, [*inputs, state])
    bench.compare(f"{name}, state_norm, backward", backward, plain, f"{name}, plain")


def _time_operation(
    bench: Bench,
    name: str,
    call: Callable[..., Tensor],
    fused: Callable[..., Tensor],
    tensors: list[Tensor],
) -> None:
    """Records forward and backward of an operation that reads and writes everything once.

    Args:
        bench: the part.
        name: of the operation.
        call: it in plain torch.
        fused: it in a Triton kernel, where one can run.
        tensors: the arguments of both.
    """
    with torch.no_grad():
        moved = nbytes([*tensors, call(*tensors)])
    # Backward, inputs and the gradient of the output are read, gradients of the inputs written.
    costs = (Cost(moved), Cost(moved + nbytes(tensors)))
    plain, _, plain_backward = _forward_and_backward(bench, lambda *x: (call(*x),), tensors)
    found, _, backward = _forward_and_backward(bench, lambda *x: (fused(*x),), tensors)
    bench.compare(f"{name}, forward", found, plain, "plain torch", cost=costs[0])
    bench.compare(f"{name}, backward", backward, plain_backward, "plain torch", cost=costs[1])


def _convolution(bench: Bench) -> None:
    sizes, device = bench.sizes, bench.device
    wide = projected(sizes, sizes.tokens, device, torch.bfloat16)
    x = wide[..., sizes.d_inner : sizes.d_inner + sizes.d_conv_input]
    weight = torch.randn(sizes.d_conv_input, 4, device=device)
    bias = torch.randn(sizes.d_conv_input, device=device)
    state = torch.randn(1, 3, sizes.d_conv_input, device=device).bfloat16()

    def call(x: Tensor, weight: Tensor, bias: Tensor, fused: bool | None = False) -> Tensor:
        return causal_conv(x, weight, bias, state, activation=True, fused=fused)[0]

    fused = partial(call, fused=None)
    _time_operation(bench, "convolution with SiLU", call, fused, [x, weight, bias])


def _norms(bench: Bench) -> None:
    sizes, device = bench.sizes, bench.device
    shape = (1, sizes.tokens, sizes.d_inner)
    y, z = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(sizes.d_inner, device=device)

    def gated(y: Tensor, z: Tensor, weight: Tensor, fused: bool | None = False) -> Tensor:
        return gated_rms_norm(y, z, weight, 1e-5, 1, fused=fused)

    def plain(x: Tensor, weight: Tensor, fused: bool | None = False) -> Tensor:
        return rms_norm(x, weight, 1e-5, fused=fused)

    _time_operation(bench, "gated RMSNorm", gated, partial(gated, fused=None), [y, z, weight])
    x = torch.randn(1, sizes.tokens, sizes.d_model, device=device).bfloat16()
    narrow = weight[: sizes.d_model]
    _time_operation(bench, "RMSNorm", plain, partial(plain, fused=None), [x, narrow])


def _head(bench: Bench) -> None:
    """Loss and both gradients of the head, which one call computes."""
    sizes, device = bench.sizes, bench.device
    hidden = torch.randn(sizes.tokens, sizes.d_model, device=device).bfloat16().requires_grad_()
    head = torch.randn(sizes.vocab_size, sizes.d_model, device=device).mul_(0.02).requires_grad_()
    targets = torch.randint(sizes.vocab_size, (sizes.tokens,), device=device)
    weights = torch.full((sizes.tokens,), 1 / sizes.tokens, device=device)

    def call(fused: bool | None) -> object:
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = weighted_cross_entropy(hidden, head, targets, weights, fused=fused)
        return torch.autograd.grad(loss, (hidden, head))

    flops = 3 * 2.0 * sizes.tokens * sizes.d_model * sizes.vocab_size
    cost = Cost(nbytes([hidden, hidden, head, head]), flops)
    plain = bench.milliseconds(lambda: call(False))
    bench.reset_peak()
    ms = bench.milliseconds(lambda: call(None))
    bench.compare("head, loss and gradients", ms, plain, "plain torch", cost=cost)
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
