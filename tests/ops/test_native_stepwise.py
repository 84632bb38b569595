"""The stepwise cells in C++ against the loop that calls the hooks of an edit once per token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longrnn.ops.native import stepwise
from torch import Tensor

from longrnn.cells import MIXERS, Edit, EditedState, Update
from longrnn.cells.stepwise import StepwiseCell
from longrnn.mitigations import Mitigated, mitigation
from longrnn.mitigations.state_norm import Limit
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.ops import native
from longrnn.state import PyTree, leaves, tree_map
from tests.contracts.builders import (
    DEFINED,
    assert_near,
    build_mitigated,
    build_mixer,
    mixer_spec,
    random_start,
    random_tokens,
    random_tree,
    recurrent,
    spec_id,
)
from tests.ops.test_native import library, threads

__all__ = ["library", "threads"]  # fixtures

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing()))
CELLS: list[dict[str, Any]] = [
    *({"kind": "rnn", "nonlinearity": name} for name in ("tanh", "relu", "identity")),
    {"kind": "gru"},
    {"kind": "lstm"},
]
PAIRS = [(spec, mixer) for spec, mixer in DEFINED if mixer["kind"] in ("rnn", "gru", "lstm")]
CHAINS = ["forget_more+state_norm(threshold=0.8)", "sliding_window(window=5)+forget_more"]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


def wide_mixer(spec: dict[str, Any], dtype: torch.dtype, width: int) -> StepwiseCell:
    torch.manual_seed(0)
    mixer = MIXERS.build(spec, 5, width).to(dtype)
    assert isinstance(mixer, StepwiseCell)
    return mixer


def both(
    mixer: StepwiseCell, x: Tensor, state: PyTree, edit: Edit, carry: PyTree = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, state and carry of the C++ loop, and of the Python loop, as lists of tensors."""
    with torch.no_grad():
        ours = mixer._native(x, state, edit, carry)
        assert ours is not None
        theirs = mixer._edited(x, state, edit, carry)
    return [leaf for _, leaf in leaves(ours)], [leaf for _, leaf in leaves(theirs)]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("spec", CELLS, ids=spec_id)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=spec_id)
def test_every_compiled_library_gives_the_loop_over_hooks(
    spec: dict[str, Any], dtype: torch.dtype
) -> None:
    """Widths that are and are not multiples of a vector, few and many rows and tokens."""
    for width, rows, time in ((3, 1, 1), (37, 9, 20), (64, 7, 5), (70, 1, 33)):
        mixer = wide_mixer(spec, dtype, width)
        state = random_tree(mixer.init_state(rows), 1)
        x = random_tree(torch.empty(rows, time, 5, dtype=dtype), 2)
        for edit in (Edit(), Limit(torch.tensor([0.3 * width**0.5], dtype=torch.float64))):
            for ours, theirs in zip(*both(mixer, x, state, edit), strict=True):
                assert_near(ours, theirs, TOLERANCE[dtype])


def run_chain(spec: str, kind: str, sizes: list[int]) -> list[Tensor]:
    """Logits and final state of a mitigated model in pieces, without gradients."""
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(11, 24, 2, {"kind": kind})).double()
    mitigated = Mitigated(model, mitigation(spec))
    state, outputs = random_start(mitigated, 3), []
    with torch.no_grad():
        for part in random_tokens(3, sum(sizes)).split(sizes, 1):
            logits, state = mitigated(part, state)
            outputs.append(logits)
    return [torch.cat(outputs, 1), *(leaf for _, leaf in leaves(state))]


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("spec", CHAINS)
@pytest.mark.parametrize("sizes", [[40], [1, 3, 5, 13], [1] * 12], ids=str)
def test_chains_of_mitigations_give_the_loop_over_hooks(
    kind: str, spec: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = run_chain(spec, kind, sizes)
    monkeypatch.setattr(stepwise, "suits", lambda *_: False)
    for one, other in zip(ours, run_chain(spec, kind, sizes), strict=True):
        assert_near(one, other, 1e-12, scale=1e-6)


@pytest.mark.parametrize(("spec", "mixer"), PAIRS, ids=spec_id)
def test_every_defined_pair_runs_in_cpp_without_gradients(
    spec: dict[str, Any], mixer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_mitigated([spec], mixer)
    for cell in recurrent(model).cells:
        monkeypatch.setattr(cell, "_edited", None)
    with torch.no_grad():
        model(random_tokens(2, 9))
    with pytest.raises(TypeError):
        model(random_tokens(2, 9))


class Halved(Limit):
    """Halves the new memory after limiting it."""

    def advance(self, memory: Tensor, update: Update, carry: PyTree) -> tuple[Tensor, PyTree]:
        memory, carry = super().advance(memory, update, carry)
        return memory / 2, carry


class Counted(Edit):
    """Counts tokens."""

    def init_carry(self, mixer: Any, batch_size: int) -> Tensor:
        return torch.zeros(batch_size)

    def edit_update(self, update: Update, carry: Tensor) -> tuple[Update, Tensor]:
        return update, carry + 1


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_an_edit_with_hooks_of_its_own_has_them_called(kind: str) -> None:
    """Also if it inherits from one that says what it does as data."""
    mixer = build_mixer(mixer_spec(kind))
    halved = Halved(torch.tensor([0.5], dtype=torch.float64))
    state, x = mixer.init_state(2), random_tree(torch.empty(2, 6, 10, dtype=torch.float64))
    with torch.no_grad():
        assert halved.update_rule(()) is None
        y, _ = mixer(x, state, halved)
        tracked, _ = mixer(x, state, Halved(halved.limit.value))
        assert_near(y, tracked, 1e-14)
        _, after = mixer(x, EditedState(state, torch.zeros(2)), Counted())
    assert after.carry.tolist() == [6, 6]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=spec_id)
def test_memories_of_any_magnitude_are_limited(dtype: torch.dtype) -> None:
    """Norms whose squares leave the range of the dtype, and values that are not finite."""
    mixer = wide_mixer({"kind": "rnn", "nonlinearity": "identity"}, dtype, 6)
    limit = Limit(torch.tensor([2.0], dtype=torch.float64))
    sizes = [1.0, 1e37, 1e-30] if dtype == torch.float32 else [1.0, 1e200, 1e-200]
    for size in (*sizes, torch.nan, torch.inf):
        x = torch.full((2, 3, 5), size, dtype=dtype)
        ours, theirs = both(mixer, x, mixer.init_state(2), limit)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 3, 13])
def test_the_number_of_threads_changes_no_value(rows: int) -> None:
    mixer = wide_mixer({"kind": "lstm"}, torch.float32, 64)
    state = random_tree(mixer.init_state(rows), 1)
    x = random_tree(torch.empty(rows, 40, 5), 2)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(both(mixer, x, state, Edit())[0])
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def test_a_call_leaves_the_given_carry_unchanged() -> None:
    """The kernel changes the terms of a window in copies."""
    model = build_mitigated([{"kind": "sliding_window", "window": 4}], "gru")
    state = random_start(model, 2)
    with torch.no_grad():
        state = model(random_tokens(2, 6), state).state
        before = tree_map(torch.clone, state)
        first = model(random_tokens(2, 11), state)
        again = model(random_tokens(2, 11), state)
    for (_, one), (_, other) in zip(leaves(state), leaves(before), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(first.logits, again.logits)


def test_a_cell_names_the_kernels_that_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kernel=C++ without gradients, torch.nn with gradients" in repr(
        build_mixer({"kind": "gru"})
    )
    assert "kernel=torch.nn\n" in repr(build_mixer({"kind": "lstm"}))
    monkeypatch.setattr(native, "library", lambda: None)
    assert "kernel=torch.nn\n" in repr(build_mixer({"kind": "gru"}))
