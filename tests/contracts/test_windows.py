"""A sliding window of any width, in calls of any length, remembers what its definition says."""

import time
from typing import Any

import pytest
import torch

from longrnn import state as states
from longrnn.models import RecurrentLM
from longrnn.state import is_entries, leaves
from tests.contracts.builders import assert_near, build_mitigated, mixer_spec, random_tokens
from tests.contracts.subjects import BACKENDS, cell_leaves, read, started

pytestmark = pytest.mark.core

MIXERS: dict[str, dict[str, Any]] = {
    **{f"mamba2 {backend}": mixer_spec("mamba2") | {"backend": backend} for backend in BACKENDS},
    **{kind: {"kind": kind} for kind in ("gru", "lstm")},
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)


def windowed(mixer: dict[str, Any], window: int, **more: Any) -> RecurrentLM:
    return build_mitigated([{"kind": "sliding_window", "window": window}], mixer, **more)


@every_mixer
def test_memory_and_time_are_those_of_what_was_read(mixer: dict) -> None:
    """A window wider than any text costs what the text costs, and is the model without one."""
    model, tokens = windowed(mixer, 10**8), random_tokens(2, 90)
    start = time.perf_counter()
    logits, state = model(tokens)
    assert time.perf_counter() - start < 30
    plain = model.under(None)
    assert_near(logits, plain(tokens).logits, 1e-10)
    sizes = {leaf.shape[1] for name, leaf in leaves(state) if is_entries(name)}
    assert sizes == {90}
    assert states.nbytes(model.init_state(1)) == states.nbytes(plain.init_state(1))


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_what_came_before_the_window_has_no_effect(backend: str) -> None:
    """Not even NaN. The gates of other cells read their last output, in which it stays."""
    mixer = MIXERS[f"mamba2 {backend}"]
    model, tokens = windowed(mixer, 6, n_layers=1), random_tokens(2, 60)
    broken = states.tree_map(
        lambda leaf: leaf * torch.nan if leaf.is_floating_point() else leaf, started(model, 2)
    )
    for sizes in ([60], [20, 1, 39]):
        ours, found = read(model, tokens, broken, sizes)
        theirs, whole = read(model, tokens, started(model, 2), sizes)
        assert ours[:, 0].isnan().all()
        assert_near(ours[:, 20:], theirs[:, 20:], 1e-10)
        for name, leaf in cell_leaves(model, found).items():
            assert_near(leaf, cell_leaves(model, whole)[name], 1e-10, name)
