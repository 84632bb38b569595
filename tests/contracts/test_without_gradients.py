"""A call without gradients, which may run faster code, gives the values of one with gradients.

So does one with frozen weights, which also gives the same gradients of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrnn.mitigations import Mitigated
from longrnn.models import RecurrentLM
from longrnn.state import LMState
from tests.contracts.builders import (
    DEFINED,
    DTYPES,
    MIXER_SPECS,
    assert_same,
    build_mitigated,
    build_model,
    differentiable,
    gradients,
    random_start,
    random_state,
    random_tokens,
    real_leaves,
    spec_id,
    splits,
)

pytestmark = pytest.mark.core

seeds = st.integers(0, 10**6)


def outcome(
    model: RecurrentLM | Mitigated,
    tokens: Tensor,
    state: LMState,
    sizes: Sequence[int],
    masks: dict[str, Tensor],
    *,
    tracked: bool,
) -> dict[str, Tensor]:
    """Logits, final state and carries of a call in pieces."""
    outputs, start = [], 0
    with torch.set_grad_enabled(tracked):
        for size in sizes:
            part = slice(start, start + size)
            cut = {name: mask[:, part] for name, mask in masks.items()}
            logits, state = model(tokens[:, part], state, **cut)
            assert logits.requires_grad == tracked
            outputs.append(logits)
            start += size
    found = {"logits": torch.cat(outputs, dim=1), **real_leaves(state, "final ")}
    return {name: value.detach() for name, value in found.items()}


def assert_same_without_gradients(
    model: RecurrentLM | Mitigated, state: LMState, sizes: list[int], seed: int, *, packed: bool
) -> None:
    batch, time, masks = len(state.position), sum(sizes), {}
    if packed:
        draw = torch.rand(batch, time, generator=torch.Generator().manual_seed(seed))
        masks = {"is_token": draw > 0.2, "is_document_start": draw > 0.9}
    dtype = next(model.parameters()).dtype
    tokens = random_tokens(batch, time, seed)
    ours, exact = (
        outcome(model, tokens, state, sizes, masks, tracked=tracked) for tracked in (False, True)
    )
    assert_same(ours, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
@settings(max_examples=3)
@given(sizes=splits(empty=False, longest=70), batch=st.integers(1, 8), seed=seeds)
def test_a_model_gives_the_same_without_gradients(
    spec: dict[str, Any], packed: bool, dtype: torch.dtype, sizes: list[int], batch: int, seed: int
) -> None:
    model = build_model(spec, dtype=dtype, seed=seed)
    state = random_state(model, batch, seed)
    assert_same_without_gradients(model, state, sizes, seed, packed=packed)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
@settings(max_examples=2)
@given(sizes=splits(empty=False, longest=40), batch=st.integers(1, 8), seed=seeds)
def test_a_mitigated_model_gives_the_same_without_gradients(
    spec: dict[str, Any],
    mixer: dict[str, Any],
    packed: bool,
    dtype: torch.dtype,
    sizes: list[int],
    batch: int,
    seed: int,
) -> None:
    model = build_mitigated([spec], mixer, dtype=dtype, seed=seed)
    state = random_start(model, batch, seed)
    assert_same_without_gradients(model, state, sizes, seed, packed=packed)


def start_gradients(
    model: RecurrentLM | Mitigated, state: LMState, sizes: list[int]
) -> dict[str, Tensor]:
    """Logits of a call in pieces, and the gradients of the state before it."""
    start = after = differentiable(state)
    outputs = []
    for part in random_tokens(len(state.position), sum(sizes)).split(sizes, 1):
        logits, after = model(part, after)
        outputs.append(logits)
    logits = torch.cat(outputs, 1)
    found = gradients((logits, after), real_leaves(start, "start "))
    return {"logits": logits.detach(), **found}


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [5, 1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize(
    ("spec", "mixer"), [*((None, one) for one in MIXER_SPECS), *DEFINED], ids=spec_id
)
def test_a_state_has_the_same_gradients_with_frozen_weights(
    spec: dict[str, Any] | None, mixer: dict[str, Any], dtype: torch.dtype, sizes: list[int]
) -> None:
    if spec is None:
        model = build_model(mixer, dtype=dtype)
        state = random_state(model, 2)
    else:
        model = build_mitigated([spec], mixer, dtype=dtype)
        state = random_start(model, 2)
    expected = start_gradients(model, state, sizes)
    assert_same(start_gradients(model.requires_grad_(False), state, sizes), expected, dtype)
