"""Any split of a sequence gives what one call gives: outputs, final state and gradients.

So do calls without gradients, which run other kernels, and calls with frozen weights.
"""

from itertools import product

import pytest
import torch

from longrnn.state import leaves
from tests.contracts.builders import (
    DTYPES,
    LONGEST,
    MIXER_SPECS,
    Spec,
    build_mitigated,
    build_model,
    mixer_spec,
    random_sizes,
    random_state,
    random_tokens,
)
from tests.contracts.subjects import (
    Subject,
    assert_same,
    cell_leaves,
    every_kind,
    every_subject,
    every_subject_in_a_dtype,
    in_float64,
    outcome,
    read,
    small_chunks,
    started,
)

pytestmark = pytest.mark.core

TIME = 75  # more than a chunk of the C++ kernels, and several windows


def test_gradients_of_one_token_after_another() -> None:
    """Of one row with one head, whose slices are contiguous although they begin at odd numbers."""
    model = build_model({"kind": "mamba3", "d_state": 5, "head_dim": 16})
    state, tokens = started(model, 1), random_tokens(1, 3)
    whole = outcome(model, tokens, state, [3])
    assert_same(outcome(model, tokens, state, [1, 1, 1]), whole, torch.float64)


@every_subject_in_a_dtype
def test_any_split_gives_the_same(subject: Subject, dtype: torch.dtype) -> None:
    """From a state that is not zero; pieces have small chunks, the whole large ones."""
    model = subject.build(dtype)
    state, tokens = started(model, 2), random_tokens(2, TIME)
    whole = outcome(model, tokens, state, [TIME])
    values = {name: one.detach() for name, one in whole.items() if not name.startswith("gradient")}
    sizes = random_sizes(TIME, 1, empty=True)
    with small_chunks(16):
        assert_same(outcome(model, tokens, state, sizes), whole, dtype)
    with torch.no_grad():
        logits, after = read(model, tokens, state, random_sizes(TIME, 2, empty=True))
    found = {"logits": logits, "position": after.position, **cell_leaves(model, after)}
    assert_same(found, values, dtype)


@every_kind
def test_single_tokens_with_frozen_weights(subject: Subject) -> None:
    model = subject.build()
    state, tokens = started(model, 2), random_tokens(2, 4)
    expected = outcome(model, tokens, state, [1, 1, 1, 1])
    model.requires_grad_(False)
    found = outcome(model, tokens, state, [1, 1, 1, 1])
    assert found.keys() < expected.keys()
    assert_same(found, {name: expected[name] for name in found}, torch.float64)


@pytest.mark.slow
@every_subject
def test_random_splits_of_long_texts(subject: Subject) -> None:
    for dtype, seed in product(DTYPES, range(20)):
        model = subject.build(dtype, seed=seed, n_layers=2)
        batch, time = 1 + seed % 3, 1 + 97 * seed % LONGEST
        state, tokens = started(model, batch, seed), random_tokens(batch, time, seed)
        found = outcome(model, tokens, state, random_sizes(time, seed, empty=True))
        whole, exact = outcome(model, tokens, state, [time]), None
        if dtype == torch.float32:
            double, wide = in_float64(model, state)
            exact = outcome(double, tokens, wide, [time])
        assert_same(found, whole, dtype, exact=exact)


LONG_MEMORY: list[Spec] = [
    {"kind": "state_norm", "threshold": 0.015},
    {"kind": "sliding_window", "window": 150},
    {"kind": "forget_more", "decay_scale": 0.9999, "input_scale": 0.75},
]
LONG = [([], spec) for spec in MIXER_SPECS] + [
    ([spec], mixer_spec(kind)) for spec in LONG_MEMORY for kind in ("mamba2", "lstm")
]


@pytest.mark.parametrize(("specs", "mixer"), LONG, ids=str)
def test_float32_does_not_drift(specs: list[Spec], mixer: Spec) -> None:
    """3,000 tokens one by one and at once, against the same weights in float64."""
    narrow, wide = (build_mitigated(specs, mixer, dtype=torch.float32) for _ in "ab")
    wide, tokens = wide.double(), random_tokens(1, 3000)
    with torch.no_grad():
        expected = read(wide, tokens, random_state(wide, 1), [3000])
        for sizes in ([3000], [1] * 60 + [2940]):
            logits, state = read(narrow, tokens, random_state(narrow, 1), sizes)
            found = {"logits": logits[:, -500:], **cell_leaves(narrow, state)}
            exact = {"logits": expected[0][:, -500:], **cell_leaves(wide, expected[1])}
            assert_same(found, exact, torch.float32, tolerance=3e-5)
    assert all(leaf.isfinite().all() for _, leaf in leaves(state))
