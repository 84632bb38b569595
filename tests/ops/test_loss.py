"""The cross-entropy in pieces equals that of all logits at once."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from benchmarks.memory import LiveBytes
from longrnn.errors import UserError
from longrnn.ops import loss as loss_module
from longrnn.ops.loss import token_cross_entropy, weighted_cross_entropy
from tests.contracts.builders import generator

VOCAB, D = 37, 8
# From one token per piece to all tokens in one piece.
MAX_LOGITS = [1, 5 * VOCAB, 8 * VOCAB, 10**6]


def draw(dtype: torch.dtype, rows: int = 3, time: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random hidden vectors, head, targets (some of them not scored) and weights."""
    randomness = generator(5)
    hidden = torch.randn(rows, time, D, generator=randomness, dtype=torch.float64)
    head = torch.randn(VOCAB, D, generator=randomness, dtype=torch.float64)
    targets = torch.randint(VOCAB, (rows, time), generator=randomness)
    targets[torch.rand(rows, time, generator=randomness) < 0.3] = -100
    weights = torch.rand(rows, time, generator=randomness)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets, weights


def plain(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, predictions and logits by the formula, with all logits at once."""
    logits = F.linear(hidden, head)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    per_token = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none")
    return (per_token * weights.flatten()).sum(), logits.argmax(-1), logits


@pytest.mark.parametrize("max_logits", MAX_LOGITS)
def test_loss_predictions_and_gradients_equal_the_formula(
    max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every size of a piece, with unscored tokens and a factor on the loss."""
    monkeypatch.setattr(loss_module, "MAX_PIECE_LOGITS", max_logits)
    given = draw(torch.float64)
    loss, predictions, _ = plain(*given)
    actual = weighted_cross_entropy(*given)
    assert torch.equal(actual.predictions, predictions)
    torch.testing.assert_close(actual.loss, loss, rtol=1e-12, atol=0)
    hidden, head, targets, weights = given
    losses, predictions = token_cross_entropy(hidden, head, targets)
    torch.testing.assert_close((losses * weights).sum(), loss.detach(), rtol=1e-12, atol=0)
    assert torch.equal(predictions, actual.predictions)
    # Scaled, as in a sum of several losses: the factor is known only in the backward pass.
    expected = torch.autograd.grad(-3.7 * loss, given[:2])
    found = torch.autograd.grad(-3.7 * actual.loss, given[:2])
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
        frozen = [tensor.detach() for tensor in given[:2]]
        frozen[number].requires_grad_()
        loss = weighted_cross_entropy(frozen[0], frozen[1], targets, weights).loss
        torch.testing.assert_close(torch.autograd.grad(-3.7 * loss, frozen[number])[0], one)


def test_loss_is_zero_if_no_token_is_scored() -> None:
    hidden, head, targets, weights = draw(torch.float64)
    none = weighted_cross_entropy(hidden, head, targets, 0 * weights)
    assert none.loss.item() == 0
    assert not torch.autograd.grad(none.loss, head)[0].any()
    empty = weighted_cross_entropy(hidden[:, :0], head, targets[:, :0], weights[:, :0])
    assert (empty.loss.item(), empty.predictions.shape) == (0, (3, 0))
    losses, predictions = token_cross_entropy(hidden[:, :0], head, targets[:, :0])
    assert losses.shape == predictions.shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_loss_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "MAX_PIECE_LOGITS", 10 * VOCAB)
    given = draw(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        actual = weighted_cross_entropy(*given)
    # The factors are rounded, the products are not.
    hidden, head = (tensor.to(dtype).float() for tensor in given[:2])
    expected, predictions, _ = plain(hidden, head, *given[2:])
    assert actual.loss.dtype == torch.float32
    assert torch.equal(actual.predictions, predictions)
    torch.testing.assert_close(actual.loss, expected, rtol=1e-5, atol=0)
    found = torch.autograd.grad(actual.loss, given[:2])
    wanted = torch.autograd.grad(plain(*given)[0], given[:2])
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("size", [1, 20])
def test_logits_of_narrow_weights_are_not_rounded(size: float) -> None:
    """Logits of bfloat16 weights are float32: near 100, bfloat16 has steps of 1/2."""
    hidden, head, targets, weights = draw(torch.bfloat16)
    hidden = (size * hidden.detach()).requires_grad_()
    actual = weighted_cross_entropy(hidden, head, targets, weights).loss
    expected, *_ = plain(hidden.double(), head.double(), targets, weights.double())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=0)
    losses, _ = token_cross_entropy(hidden, head, targets)
    torch.testing.assert_close((losses * weights).sum().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unscored_tokens_may_be_nan_or_infinite(dtype: torch.dtype, value: float) -> None:
    """They change neither loss nor gradients, with weight 0 and with a negative target."""
    hidden, head, targets, weights = draw(dtype)
    targets[0, 3], weights[1, 2] = -100, 0
    clean = weighted_cross_entropy(hidden, head, targets, weights)
    expected = torch.autograd.grad(clean.loss, (hidden, head))
    broken = hidden.detach().clone()
    broken[0, 3], broken[1, 2, 0] = value, value
    broken.requires_grad_()
    actual = weighted_cross_entropy(broken, head, targets, weights)
    found = torch.autograd.grad(actual.loss, (broken, head))
    for one, other in zip((actual.loss, *found), (clean.loss, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_float16_keeps_the_gradient_of_one_token_among_many() -> None:
    hidden, head, targets, weights = draw(torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        small = weighted_cross_entropy(hidden, head, targets, 1e-7 * weights).loss
        large = weighted_cross_entropy(hidden, head, targets, weights).loss
    grads_small = torch.autograd.grad(small, (hidden, head))
    grads_large = torch.autograd.grad(large, (hidden, head))
    for one, other in zip(grads_small, grads_large, strict=True):
        torch.testing.assert_close(1e7 * one, other, rtol=1e-4, atol=1e-6)


def test_no_tensor_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "MAX_PIECE_LOGITS", 256 * VOCAB)
    hidden, head, targets, weights = draw(torch.float32, rows=8, time=512)
    with LiveBytes([hidden, head]) as live:
        weighted_cross_entropy(hidden, head, targets, weights).loss.backward()
    with LiveBytes([hidden, head]) as whole:
        plain(hidden, head, targets, weights)[0].backward()
    assert live.peak < 8 * 512 * VOCAB * 4 < whole.peak


def test_a_loss_without_a_forward_derivative_is_refused() -> None:
    hidden, head, targets, weights = draw(torch.float64)
    hidden = hidden.detach()
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(hidden, torch.ones_like(hidden))
        with pytest.raises(UserError, match=r"torch\.nn\.functional"):
            weighted_cross_entropy(moving, head, targets, weights)
