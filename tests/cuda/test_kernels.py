"""The fused kernels in bfloat16, which the interpreter cannot compute. Not yet run on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrnn.ops.conv import causal_conv
from longrnn.ops.cross_entropy import token_cross_entropy, weighted_cross_entropy
from longrnn.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from longrnn.ops.ssd import BACKENDS, ScanInputs
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from longrnn.ops.steps import step_sizes
from tests.contracts.builders import assert_near, build_mixer, generator

pytestmark = pytest.mark.cuda
GPU = torch.device("cuda")
NARROW = torch.bfloat16
# One rounding to 8 bits of the result, and one of each gradient that passes through it.
TOLERANCE = 4 * 2**-8


def draw(*shape: int) -> Tensor:
    """Numbers that bfloat16 holds exactly, on the GPU."""
    drawn = torch.randn(shape, generator=generator(sum(shape)))
    return drawn.to(NARROW).to(GPU)


def both(run, *tensors: Tensor) -> None:
    """The kernel in bfloat16 and torch's operators in float64 agree, with all gradients."""

    def outcome(fused: bool, dtype: torch.dtype) -> list[Tensor]:
        given = [one.to(dtype).requires_grad_() for one in tensors]
        y = run(*given, fused)
        return [y, *torch.autograd.grad(y.double().square().sum(), given)]

    pairs = zip(outcome(True, NARROW), outcome(False, torch.float64), strict=True)
    for number, (ours, exact) in enumerate(pairs):
        assert_near(ours, exact, TOLERANCE, str(number))


def test_convolution() -> None:
    """More tokens than one program of the backward pass adds up."""
    both(
        lambda x, state, weight, bias, fused: causal_conv(
            x, weight, bias, state, activation=True, fused=fused
        )[0],
        *(draw(2, 2500, 300), draw(2, 3, 300), draw(300, 4), draw(300)),
    )


def test_step_sizes() -> None:
    """dt is float32, and the gradient of its input is rounded once."""
    both(
        lambda raw, bias, fused: step_sizes(
            raw, bias, (1e-3, 2.0), torch.promote_types(raw.dtype, torch.float32), fused=fused
        ),
        *(draw(2, 700, 80), draw(80)),
    )


@torch.no_grad()
@pytest.mark.parametrize(("window", "chunk"), [(1000, None), (2100, 512)])
def test_windows(window: int, chunk: int | None) -> None:
    """The shape of Mamba-2 2.7B, in two calls; one begins inside a chunk."""
    x, B, C = draw(1, 3000, 80, 64), draw(1, 3000, 1, 128), draw(1, 3000, 1, 128)
    gain, log_decay = draw(1, 3000, 80).float().abs(), -0.01 * draw(1, 3000, 80).float().abs()
    inputs = ScanInputs(x, gain, log_decay, B, C)
    found = {}
    for name in ("triton", "chunked"):
        like = ScanInputs(*(tensor[0, :1] for tensor in inputs))
        carry = init_carry(like, torch.zeros(1, 80, 64, 128, device=GPU), window, chunk)
        y, states = [], carry.back
        for part in (inputs.slice(0, 1300), inputs.slice(1300, 3000)):
            one, states, carry = windowed_ssd(part, carry, window, BACKENDS[name])
            y.append(one)
        found[name] = torch.cat(y, 1), states
    for ours, theirs in zip(found["triton"], found["chunked"], strict=True):
        assert_near(ours, theirs, 2e-5)


@pytest.mark.parametrize("groups", [1, 8])
def test_norms(groups: int) -> None:
    """The widths of Mamba-2 2.7B."""
    both(
        lambda x, gate, weight, fused: gated_rms_norm(x, gate, weight, 1e-5, groups, fused=fused),
        *(draw(2, 700, 5120), draw(2, 700, 5120), draw(5120)),
    )
    both(
        lambda x, weight, fused: rms_norm(x, weight, 1e-5, fused=fused),
        *(draw(2, 700, 2560), draw(2560)),
    )


def test_residual_and_norm() -> None:
    """The width of Mamba-2 2.7B; the norm is that of the rounded sum."""
    both(
        lambda x, branch, weight, fused: torch.cat(
            add_rms_norm(x, branch, weight, 1e-5, fused=fused)
        ),
        *(draw(2, 700, 2560), draw(2, 701, 2560)[:, 1:], draw(2560)),
    )


def test_residual_in_float32() -> None:
    """A wide stream, a narrow branch and a narrow norm; each gradient has its own dtype."""
    x, branch, weight = draw(2, 700, 2560).float(), draw(2, 700, 2560), draw(2560)

    def outcome(fused: bool) -> list[Tensor]:
        given = [one.clone().requires_grad_() for one in (x, branch, weight)]
        wide, narrow, factor = given
        total, normed = add_rms_norm(wide, narrow, factor, 1e-5, dtype=NARROW, fused=fused)
        loss = total.square().sum() + normed.float().pow(3).sum()
        return [total, normed, *torch.autograd.grad(loss, given)]

    for ours, theirs in zip(outcome(True), outcome(False), strict=True):
        assert ours.dtype == theirs.dtype
        assert_near(ours, theirs.double(), TOLERANCE)


def test_losses() -> None:
    """A large vocabulary, in pieces; logits are never rounded."""
    hidden, head = draw(300, 64), draw(50_288, 64)
    targets = torch.randint(50_288, (300,), device=GPU)
    weights = torch.rand(300, device=GPU)
    both(
        lambda x, head, fused: (
            weighted_cross_entropy(x, head, targets, weights, max_logits=2**22, fused=fused).loss
        ),
        hidden,
        head,
    )
    found, _ = token_cross_entropy(hidden, head, targets, fused=True)
    exact, _ = token_cross_entropy(hidden.double(), head.double(), targets, fused=False)
    assert_near(found, exact, 1e-5)


@torch.no_grad()
def test_one_token_of_a_large_cell() -> None:
    """The shape of Mamba-2 2.7B in bfloat16: two calls of one token equal one of both."""
    spec = {"kind": "mamba2", "d_state": 128, "head_dim": 64}
    mixer = build_mixer(spec).to(NARROW).to(GPU)
    x = draw(2, 2, mixer.d_input)
    whole, after = mixer(x, mixer.init_state(2))
    state, pieces = mixer.init_state(2), []
    for token in x.split(1, dim=1):
        y, state = mixer(token, state)
        pieces.append(y)
    assert_near(torch.cat(pieces, 1), whole, TOLERANCE)
    for ours, theirs in zip(state, after, strict=True):
        assert_near(ours, theirs, TOLERANCE)
