"""Segments that are read one after another, or repeated, equal one long call; resets are exact."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import MIXERS
from longrnn.data import Batch
from longrnn.data.batch import row_starts
from longrnn.errors import UserError
from longrnn.models import RecurrentLM
from longrnn.state import LMState, leaves, take
from longrnn.training.objective import Objective
from longrnn.training.repeat import read_repeatedly
from tests.contracts.builders import (
    assert_near,
    assert_trees_near,
    build_model,
    differentiable,
    random_state,
    random_tokens,
)

LENGTH, K, ROWS = 7, 4, 3
cells = pytest.mark.parametrize("mixer", list(MIXERS))


def segments(tokens: Tensor, is_document_start: dict[int, list[bool]]) -> list[Batch]:
    """K segments of rows of K · LENGTH + 1 tokens; document starts by segment, false by default."""
    starts = range(0, K * LENGTH, LENGTH)

    def begins(index: int) -> Tensor:
        return torch.tensor(is_document_start.get(index, [False] * ROWS))

    return [
        Batch(
            tokens[:, start : start + LENGTH],
            tokens[:, start + 1 : start + LENGTH + 1],
            row_starts(tokens[:, :LENGTH], begins(index)),
            torch.full((ROWS, LENGTH), 1 / LENGTH, dtype=torch.float64),
        )
        for index, start in enumerate(starts)
    ]


def test_the_first_document_of_a_row_starts_from_the_initial_state() -> None:
    model, tokens = build_model("mamba2"), random_tokens(1, 8)
    starts = torch.arange(7)[None] % 4 == 0
    state = random_state(model, 1)
    found = Objective(model)([Batch(tokens[:, :-1], tokens[:, 1:], starts)], state).loss
    first, _ = summed(model, tokens[:, :5], state)
    second, _ = summed(model, tokens[:, 4:], model.init_state(1))
    assert_near(found, (first + second) / 7, 1e-10)


def gradients(model: RecurrentLM, loss: Tensor, state: LMState) -> dict[str, Tensor]:
    inputs = dict(model.named_parameters())
    inputs |= {n: leaf for n, leaf in leaves(state) if leaf.is_floating_point()}
    found = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


def summed(model: RecurrentLM, tokens: Tensor, state: LMState) -> tuple[Tensor, LMState]:
    """The summed loss of one call over whole rows."""
    logits, end = model(tokens[:, :-1], state)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return loss, end


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    scale = max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        assert_near(actual[name], value, 1e-10, name, scale=scale)


STARTS = {1: [False, True, False], 2: [True, False, False], 3: [False, True, False]}


@cells
@pytest.mark.parametrize(("position", "starts"), [("none", {}), ("sinusoidal", STARTS)])
def test_segments_are_one_long_call_per_document(
    mixer: str, position: str, starts: dict[int, list[bool]]
) -> None:
    """With STARTS, row 0 begins a document with segment 2, row 1 with 1 and 3, row 2 none."""
    model = build_model(mixer, position)
    tokens = random_tokens(ROWS, K * LENGTH + 1)
    # The first segment starts where the initial state says, document start or not.
    is_document_start = {0: [True] * ROWS, **starts}
    state = differentiable(random_state(model, ROWS))
    output = Objective(model)(segments(tokens, is_document_start), state)

    losses, ends = [], []
    for row in range(ROWS):
        cuts = [0, *(k for k in range(1, K) if is_document_start.get(k, [False] * ROWS)[row]), K]
        one = take(state, [row])
        for begin, end in pairwise(cuts):
            if begin:
                one = model.init_state(1)
            piece = tokens[row : row + 1, begin * LENGTH : end * LENGTH + 1]
            loss, one = summed(model, piece, one)
            losses.append(loss)
        ends.append(one)
    loss = torch.stack(losses).sum() / (ROWS * K * LENGTH)
    assert_near(output.loss, loss, 1e-12)
    compare(gradients(model, output.loss, state), gradients(model, loss, state))
    for row, end in enumerate(ends):
        assert_trees_near(take(output.state, [row]), end, 1e-10)


# Without a convolution, what the one layer reads is the same in every reading.
ONE_READING = {
    "decays per head": {"kind": "mamba2", "d_state": 4, "head_dim": 4, "d_conv": 1},
    "decays per key": {"kind": "mamba", "d_state": 4, "d_conv": 1},
}


@pytest.mark.parametrize("time", [5, 150])
@pytest.mark.parametrize("mixer", ONE_READING)
def test_a_model_of_one_layer_ends_where_reading_again_ends(mixer: str, time: int) -> None:
    """Repetition gives the state of k readings, for each row and across chunks."""
    model = build_model(ONE_READING[mixer], n_layers=1)
    text, tokens = random_tokens(2, 7, seed=1), random_tokens(2, time, seed=2)
    start = model(text).state
    times = torch.tensor([3, 5])
    _, end = read_repeatedly(model, tokens, start, times)
    found = end.layers[0].ssm
    for row, count in enumerate(times.tolist()):
        again = tokens[row : row + 1].repeat(1, count)
        start = model(text[row : row + 1]).state
        expected = model(again, start).state.layers[0].ssm
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["lstm", "gated_deltanet", "mamba3"])
def test_other_cells_are_refused(kind: str) -> None:
    """A cell of which a second reading is not the same map of numbers is refused."""
    model = build_model(kind)
    tokens, start = random_tokens(2, 5), model.init_state(2)
    once, _ = read_repeatedly(model, tokens, start, torch.tensor([1, 1]))
    assert torch.equal(once, model.hidden(tokens, start)[0])
    with pytest.raises(UserError, match="max_repeat"):
        read_repeatedly(model, tokens, start, torch.tensor([1, 2]))
