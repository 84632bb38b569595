"""Any split of a sequence gives what one call gives: outputs, final state and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrnn.mixers import Edit
from longrnn.models import segments
from tests.contracts import builders
from tests.contracts.builders import (
    BLOCK_KINDS,
    D_MODEL,
    DTYPES,
    MIXER_SPECS,
    POSITION_SPECS,
    assert_same,
    build_mixer,
    build_model,
    mixer_outcome,
    model_outcome,
    random_state,
    random_tokens,
    random_tree,
    spec_id,
    splits,
)

pytestmark = pytest.mark.core

POSITION_KINDS = [spec["kind"] for spec in POSITION_SPECS]
seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("edit", [None, Edit()], ids=["plain", "edited"])
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
@settings(max_examples=6)
@given(sizes=splits(empty=False), batch=st.integers(1, 3), seed=seeds)
def test_any_split_of_a_mixer_gives_the_same(
    spec: dict[str, Any],
    edit: Edit | None,
    dtype: torch.dtype,
    sizes: list[int],
    batch: int,
    seed: int,
) -> None:
    """From a non-zero state, with and without the hooks of an edit."""
    mixer = build_mixer(spec, dtype, seed)
    state = random_tree(mixer.init_state(batch), seed)
    x = random_tree(torch.empty(batch, sum(sizes), D_MODEL + 2, dtype=dtype), seed + 1)
    whole = mixer_outcome(mixer, x, state, [sum(sizes)], edit)
    assert_same(mixer_outcome(mixer, x, state, sizes, edit), whole, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
@settings(max_examples=4)
@given(
    sizes=splits(empty=True),
    batch=st.integers(1, 3),
    seed=seeds,
    position=st.sampled_from(POSITION_KINDS),
    block=st.sampled_from(BLOCK_KINDS),
)
def test_any_split_of_a_model_gives_the_same(
    spec: dict[str, Any],
    dtype: torch.dtype,
    sizes: list[int],
    batch: int,
    seed: int,
    position: str,
    block: str,
) -> None:
    """Pieces may also be empty."""
    model = build_model(spec, position, block, dtype, seed)
    state = random_state(model, batch, seed)
    tokens = random_tokens(batch, sum(sizes), seed)
    whole = model_outcome(model, tokens, state, [sum(sizes)])
    assert_same(model_outcome(model, tokens, state, sizes), whole, dtype)


@pytest.mark.parametrize("block", BLOCK_KINDS)
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
@settings(max_examples=2)
@given(time=st.integers(65, builders.LONGEST), batch=st.integers(1, 3), seed=seeds)
def test_segments_do_not_change_results(
    spec: dict[str, Any], block: str, time: int, batch: int, seed: int
) -> None:
    """Results do not depend on the size of the segments of a long call."""
    model = build_model(spec, "sinusoidal", block, seed=seed)
    state, tokens = random_state(model, batch, seed), random_tokens(batch, time, seed)

    def outcome(segment_tokens: int) -> dict[str, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "segment_tokens", lambda d_model: segment_tokens)
            return model_outcome(model, tokens, state, [time])

    assert_same(outcome(1), outcome(10**6), torch.float64)


@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_no_token_changes_nothing(spec: dict[str, Any]) -> None:
    """An empty call returns no logits and the very same state."""
    model = build_model(spec)
    state = random_state(model, 2)
    logits, after = model(random_tokens(2, 0), state)
    assert logits.shape == (2, 0, model.vocab_size)
    builders.assert_trees_equal(after, state)
