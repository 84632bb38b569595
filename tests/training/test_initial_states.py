"""Initial states: what each policy passes on, and to which row."""

import math
from typing import Any

import pytest
import torch

from longrnn import RecurrentConfig, RecurrentLM
from longrnn.cells import MIXERS
from longrnn.data import Batch
from longrnn.data.batch import row_starts
from longrnn.state import LMState, leaves, take, tree_map
from longrnn.training.initial_states import INITIAL_STATES, Context, InitialState
from tests.contracts.builders import (
    assert_near,
    assert_trees_equal,
    assert_trees_near,
    build_model,
    random_state,
)

cells = pytest.mark.parametrize("mixer", list(MIXERS))
policies = pytest.mark.parametrize("kind", list(INITIAL_STATES))
ROWS = 6


def policy(kind: str, mixer: str = "mamba2", rank: int = 0, **options: Any) -> InitialState:
    model = build_model(mixer, dtype=torch.float32)
    context = Context(model.init_state, 7, rank)
    return INITIAL_STATES.build({"kind": kind, **options}, context)


def batch(is_document_start: list[bool] | None = None, rows: int = ROWS) -> Batch:
    tokens = torch.zeros(rows, 3, dtype=torch.long)
    begins = True if is_document_start is None else torch.tensor(is_document_start)
    return Batch(tokens, tokens, row_starts(tokens, begins))


def final(seed: int = 0, mixer: str = "mamba2", rows: int = ROWS) -> LMState:
    return random_state(build_model(mixer, dtype=torch.float32), rows, seed)


def is_zero(state: LMState) -> list[bool]:
    """Which rows are zero, in all leaves."""
    parts = [(leaf == 0).flatten(1).all(1) for _, leaf in leaves(state.layers)]
    return torch.stack(parts).all(0).tolist()


@cells
def test_carry_goes_on_row_by_row(mixer: str) -> None:
    found, states = policy("carry", mixer), [final(seed, mixer) for seed in (0, 1)]
    for micro in (0, 1):
        found.after(states[micro], micro)
    is_document_start = [False, True, False, False, True, False]
    for micro in (1, 0):
        state = found.before(batch(is_document_start), 1, micro)
        assert is_zero(state) == is_document_start
        for row in range(ROWS):
            if not is_document_start[row]:
                assert_trees_equal(take(state, [row]), take(states[micro], [row]))
            else:
                assert int(state.position[row]) == 0


@cells
def test_pass_shuffles_rows(mixer: str) -> None:
    found, last = policy("pass", mixer, zero_share=0.0), final(mixer=mixer)
    found.after(last, 0)
    orders = set()
    for step in range(1, 8):
        state = found.before(batch(), step, 0)
        assert state.position.tolist() == [0] * ROWS  # a new text begins
        order = []
        for row in range(ROWS):
            same = [
                other for other in range(ROWS) if torch.equal(_flat(state, row), _flat(last, other))
            ]
            assert len(same) == 1
            order += same
        assert sorted(order) == list(range(ROWS))
        orders.add(tuple(order))
    assert len(orders) > 4


def _flat(state: LMState, row: int) -> torch.Tensor:
    return torch.cat([leaf[row].flatten() for _, leaf in leaves(state.layers)])


@cells
def test_fitted_noise_has_the_moments_of_final_states(mixer: str) -> None:
    """Heads, and units of other vectors, each have their own; two batches those of a mixture."""
    found = policy("fitted_noise", mixer, zero_share=0.0, momentum=0.75)
    batches = []
    for seed in (0, 1):
        state = final(seed, mixer, rows=50)
        units = tree_map(_units, state.layers)
        moved = tree_map(lambda x, u, s=seed: (1 + u) * x + (u - 2) * (s + 1), state.layers, units)
        found.after(state._replace(layers=moved), 0)
        batches.append(leaves(tree_map(torch.Tensor.double, moved)))
    drawn = tree_map(torch.Tensor.double, found.before(batch(rows=2000), 2, 0).layers)
    total = 0.25 * 0.75 + 0.25
    states = zip(leaves(drawn), batches[0], batches[1], strict=True)
    for (name, leaf), (_, a), (_, b) in states:
        dims = (0, 2, 3) if leaf.ndim == 4 else tuple(range(leaf.ndim - 1))
        mean = (0.25 * 0.75 * a.mean(dims) + 0.25 * b.mean(dims)) / total
        square = 0.25 * 0.75 * a.square().mean(dims) + 0.25 * b.square().mean(dims)
        deviation = (square / total - mean.square()).sqrt()
        largest = deviation.max().item()
        assert_near(leaf.mean(dims), mean, 0.1, f"{name} mean", scale=largest)
        assert_near(leaf.std(dims), deviation, 0.1, f"{name} deviation")
        assert deviation.numel() == 1 or deviation.max() > 1.2 * deviation.min()


def test_fitted_noise_is_drawn_for_a_convolution_of_one_tap() -> None:
    """A state with an empty leaf has moments, and rows start from noise."""
    mixer = {"kind": "mamba2", "d_state": 4, "head_dim": 4, "d_conv": 1}
    model = RecurrentLM(RecurrentConfig(8, 8, 2, mixer))
    context = Context(model.init_state, 7)
    noise = INITIAL_STATES.build({"kind": "fitted_noise", "zero_share": 0.0}, context)
    noise.after(model(torch.randint(8, (ROWS, 20))).state, 0)
    assert is_zero(noise.before(batch(), 1, 0)) == [False] * ROWS


def _units(leaf: torch.Tensor) -> torch.Tensor:
    """The number of its head or unit in every entry, modulo 5."""
    axis = 1 if leaf.ndim == 4 else leaf.ndim - 1
    shape = [-1 if dim == axis else 1 for dim in range(leaf.ndim)]
    return (torch.arange(leaf.shape[axis]) % 5).view(shape).expand(leaf.shape).to(leaf.dtype)


@cells
def test_random_noise_has_one_deviation(mixer: str) -> None:
    """It differs by row, step and micro-batch."""
    found = policy("random_noise", mixer, zero_share=0.0, std=0.25)
    state = found.before(batch(rows=400), 0, 0)
    for name, leaf in leaves(state.layers):
        assert leaf.std().item() == pytest.approx(0.25, rel=0.1), name
        assert abs(leaf.mean().item()) < 0.02, name
    drawn = [found.before(batch(), *place) for place in ((0, 0), (1, 0), (0, 1))]
    rows = torch.stack([_flat(state, row) for state in drawn for row in range(ROWS)])
    assert len(rows.unique(dim=0)) == 3 * ROWS


@pytest.mark.parametrize("kind", ["carry", "pass", "fitted_noise", "random_noise"])
def test_a_share_of_rows_starts_from_zero(kind: str) -> None:
    streams = [False] * ROWS
    for share, expected in ((0.0, 0.0), (0.3, 0.3), (1.0, 1.0)):
        found = policy(kind, zero_share=share)
        found.after(final(), 0)
        zeros = [is_zero(found.before(batch(streams), step, 0)) for step in range(1, 200)]
        by_row = torch.tensor(zeros).float().mean(0)
        assert by_row.mean().item() == pytest.approx(expected, abs=0.05)
        assert (by_row - expected).abs().max() < 0.12
    default = {"carry": 0.0}.get(kind, 0.1)
    assert policy(kind).zero_share == default


@pytest.mark.parametrize("kind", ["zero", "carry", "fitted_noise", "random_noise"])
def test_two_processes_start_as_one(kind: str) -> None:
    options: dict[str, Any] = {} if kind == "zero" else {"zero_share": 0.4}
    whole = policy(kind, **options)
    halves = [policy(kind, rank=rank, **options) for rank in (0, 1)]
    state = final()
    state = tree_map(lambda leaf: torch.cat([leaf[:3], leaf[:3]]), state)  # equal halves
    whole.after(state, 0)
    for rank, half in enumerate(halves):
        half.after(take(state, range(3 * rank, 3 * rank + 3)), 0)
    is_document_start = [False, True, False, False, False, True]
    wanted = whole.before(batch(is_document_start), 5, 0)
    for rank, half in enumerate(halves):
        rows = range(3 * rank, 3 * rank + 3)
        found = half.before(batch([is_document_start[row] for row in rows], rows=3), 5, 0)
        assert_trees_near(found, take(wanted, rows), 1e-6)


@cells
@pytest.mark.parametrize("kind", ["carry", "pass", "fitted_noise"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_handed_on(kind: str, mixer: str, bad: float) -> None:
    found = policy(kind, mixer, zero_share=0.0)
    found.after(final(0, mixer), 0)
    spoilt = final(1, mixer)
    for _, leaf in leaves(spoilt.layers):
        leaf[2].view(-1)[0] = bad
    found.after(spoilt, 0)
    state = found.before(batch([False] * ROWS), 1, 0)
    assert all(leaf.isfinite().all() for _, leaf in leaves(state))
    assert sum(is_zero(state)) == (0 if kind == "fitted_noise" else 1)
