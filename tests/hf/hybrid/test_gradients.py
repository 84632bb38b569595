"""Gradients, carried states, packed documents and padding of hybrids are exact."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longrnn.checkpoints.adapters import add_adapters
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.model import HybridLM
from longrnn.mitigations import mitigation
from longrnn.models import Rows
from longrnn.state import take
from tests.contracts.builders import assert_near
from tests.hf.foreign import architecture, causal, hybrid, tokens

kinds = pytest.mark.parametrize("kind", sorted(FAMILIES))
ROWS, TIME = 2, 20
# Norms, routers and rotations of transformers are computed in float32, and so are the sums of
# their gradients over tokens.
NARROW = {"bailing_hybrid", "kimi_linear", "nemotron_h", "recurrent_gemma"} | {
    k for k in FAMILIES if "qwen3" in k
}


def tolerance(kind: str) -> float:
    return 1e-6 if kind in NARROW else 1e-10


@lru_cache
def double(kind: str) -> HybridLM:
    """A tiny model in float64, in training mode."""
    return hybrid(causal(kind, torch.float64)).train()


def gradients(model: HybridLM, *logits: Tensor) -> list[Tensor]:
    """Of a random function of logits, which are joined in time."""
    joined = torch.cat(logits, dim=1)
    draw = torch.Generator().manual_seed(2)
    factors = torch.randn(joined.shape, generator=draw, dtype=torch.float64)
    weights = list(model.parameters())
    return list(torch.autograd.grad((joined * factors).sum(), weights, retain_graph=True))


def assert_alike(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    scale = max(float(tensor.abs().max()) for tensor in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, tolerance, scale=scale)


@kinds
def test_gradients_are_those_of_transformers(kind: str) -> None:
    model, text = double(kind), tokens(ROWS, TIME) % 60
    expected = model.model(input_ids=text, use_cache=False).logits
    found = model(text).logits
    assert_near(found, expected, 1e-5)  # which computes recurrences in float32
    assert_alike(gradients(model, found), gradients(model, expected), 1e-5)


@kinds
def test_two_calls_have_the_gradients_of_one(kind: str) -> None:
    model, text = double(kind), tokens(ROWS, TIME) % 60
    whole = model(text)
    expected = gradients(model, whole.logits)
    for recomputes in (False, True):
        model.gradient_checkpointing_enable(recomputes)
        first = model(text[:, :7])
        second = model(text[:, 7:], first.state)
        found = gradients(model, first.logits, second.logits)
        model.gradient_checkpointing_enable(False)
        assert_near(torch.cat([first.logits, second.logits], 1), whole.logits, tolerance(kind))
        assert_alike(found, expected, tolerance(kind))


def mitigated(kind: str) -> HybridLM:
    return double(kind).under(mitigation(["forget_more", "state_norm(threshold=0.2)"]))


@lru_cache
def adapted(kind: str) -> HybridLM:
    """With adapters of all linear modules inside recurrent layers."""
    model = double.__wrapped__(kind)  # another one
    inside = [pair for cell in model.cells for pair in cell.named_modules()]
    linear = {name.rpartition(".")[2] for name, part in inside if isinstance(part, nn.Linear)}
    add_adapters(model, r=2, targets=sorted(linear), full=[])
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.requires_grad
    return model.requires_grad_()


@lru_cache
def narrow(kind: str) -> HybridLM:
    """With products in bfloat16, as in a run with mixed precision."""
    model = HybridLM(architecture(kind)).train()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


WAYS = {"float64": double, "mitigated": mitigated, "adapted": adapted, "bfloat16": narrow}


@kinds
@pytest.mark.parametrize("way", WAYS)
def test_documents_and_padding_are_computed_one_by_one(way: str, kind: str) -> None:
    """After a state as well; padding may stand on either side."""
    model, text = WAYS[way](kind), tokens(ROWS, TIME, seed=5) % 60
    close = 4e-2 if way == "bfloat16" else tolerance(kind)
    before = model(tokens(ROWS, 3) % 60).state
    starts, is_token = torch.zeros(2, ROWS, TIME, dtype=torch.bool)
    is_token[0, 2:18], is_token[1, :19] = True, True
    starts[0, [8, 15]], starts[1, 11] = True, True
    found = model(text, before, rows=Rows(is_token, starts))
    pieces = [(0, 2, 8), (0, 8, 15), (0, 15, 18), (1, 0, 11), (1, 11, 19)]
    expected, after = torch.zeros_like(found.logits), {}
    for row, start, stop in pieces:
        given = take(before, [row]) if not starts[row, start] else None
        logits, after[row] = model(text[row : row + 1, start:stop], given)
        at = torch.zeros(ROWS, TIME, 1, dtype=torch.bool)
        at[row, start:stop] = True
        padded = torch.nn.functional.pad(logits, (0, 0, start, TIME - stop))
        expected = torch.where(at, padded, expected)
    seen = is_token[..., None]
    assert_near(found.logits * seen, expected * seen, close)
    assert_alike(gradients(model, found.logits * seen), gradients(model, expected), close)
    follow: Any = tokens(ROWS, 4, seed=9) % 60
    continued = model(follow, found.state).logits
    for row in range(ROWS):
        wanted = model(follow[row : row + 1], after[row]).logits
        assert_near(continued[row : row + 1], wanted, close)
