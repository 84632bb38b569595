"""A state is a value: kept, forked, saved and reused, and never changed by its readers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.mixers import MIXERS
from longrnn.models import RecurrentLM, generate
from longrnn.state import History, LMState, leaves
from tests.contracts.builders import (
    D_MODEL,
    assert_near,
    assert_trees_equal,
    build_model,
    differentiable,
    functional,
    random_state,
    random_tokens,
)
from tests.refusals import naming

pytestmark = pytest.mark.core


@pytest.fixture(params=list(MIXERS))
def model(request: pytest.FixtureRequest) -> RecurrentLM:
    return build_model(request.param, "sinusoidal")


def set_row(state: LMState, row: int, value: float) -> LMState:
    """A copy with one row of every real leaf filled."""
    copy = states.clone(state)
    for _, leaf in leaves(copy):
        if leaf.is_floating_point():
            leaf[row] = value
    return copy


def next_logits(model: RecurrentLM, state: LMState) -> Tensor:
    return model(random_tokens(len(state.position), 70, seed=5), state).logits


def test_take(model: RecurrentLM) -> None:
    """Rows by index, in any order, repeats allowed; they go on like the rows they were."""
    state = random_state(model, 3)
    rows = [2, 0, 0]
    taken = states.take(state, rows)
    assert_trees_equal(states.take(state, torch.tensor(rows)), taken)
    for (_, leaf), (_, origin) in zip(leaves(taken), leaves(state), strict=True):
        assert torch.equal(leaf, origin[rows])
    tokens = random_tokens(3, 70)
    assert_near(model(tokens[rows], taken).logits, model(tokens, state).logits[rows], 1e-12)


def test_take_refuses_a_mask(model: RecurrentLM) -> None:
    """A mask is refused, because it would be read as the rows 1 and 0."""
    with pytest.raises(UserError, match="mask.nonzero"):
        states.take(model.init_state(2), torch.tensor([True, False]))


def test_expand(model: RecurrentLM) -> None:
    """Each row n times, copies of one row adjacent."""
    state = random_state(model, 2)
    assert_trees_equal(states.expand(state, 3), states.take(state, [0, 0, 0, 1, 1, 1]))


def test_reset(model: RecurrentLM) -> None:
    """Only the rows named start anew, and not even a NaN survives in them or in their gradients."""
    state, initial = random_state(model, 3), model.init_state(3)
    broken = set_row(state, 1, float("nan"))
    where = torch.tensor([False, True, False])
    broken = differentiable(broken)
    after = states.reset(broken, initial, where)
    assert_trees_equal(states.take(after, [1]), states.take(initial, [1]))
    assert_trees_equal(states.take(after, [0, 2]), states.take(state, [0, 2]))
    sources = [leaf for _, leaf in leaves(broken) if leaf.requires_grad]
    for gradient in torch.autograd.grad(functional(next_logits(model, after), 1), sources):
        assert gradient.isfinite().all()
        assert (gradient[1] == 0).all()


def test_detach_and_clone(model: RecurrentLM) -> None:
    """`detach` cuts the graph; `clone` shares no memory."""
    after = model(random_tokens(2, 5)).state
    assert any(leaf.requires_grad for _, leaf in leaves(after))
    detached = states.detach(after)
    assert not any(leaf.requires_grad for _, leaf in leaves(detached))
    assert_trees_equal(detached, after)
    copy = states.clone(detached)
    for _, leaf in leaves(copy):
        leaf.zero_()
    assert_trees_equal(detached, after)
    assert all((leaf == 0).all() for _, leaf in leaves(copy))


def test_nbytes(model: RecurrentLM) -> None:
    """Bytes of the tensors, growing with the batch alone."""
    state = model(random_tokens(2, 3)).state
    assert states.nbytes(state) == sum(leaf.numel() * leaf.itemsize for _, leaf in leaves(state))
    assert states.nbytes(model(random_tokens(2, 200)).state) == states.nbytes(state)
    assert states.nbytes(model.init_state(6)) == 3 * states.nbytes(state)


def test_memory_is_the_states_own(model: RecurrentLM) -> None:
    """A kept state does not hold on to the long call that made it."""
    with torch.no_grad():
        state = model(random_tokens(1, 250)).state
    held = sum(leaf.untyped_storage().nbytes() for _, leaf in leaves(state))
    assert held <= 8 * states.nbytes(state)


@pytest.mark.parametrize("value", [1e3, float("nan")])
def test_rows_are_independent(model: RecurrentLM, value: float) -> None:
    """A change of one row of a state does not affect the others."""
    state, tokens = random_state(model, 3), random_tokens(3, 130)
    others = [0, 2]
    for time in (1, 130):
        logits, after = model(tokens[:, :time], state)
        broken_logits, broken = model(tokens[:, :time], set_row(state, 1, value))
        assert not torch.equal(broken_logits[1], logits[1])
        assert_near(broken_logits[others], logits[others], 1e-12)
        left, right = leaves(states.take(broken, others)), leaves(states.take(after, others))
        for (name, leaf), (_, expected) in zip(left, right, strict=True):
            assert_near(leaf, expected, 1e-12, name)


def test_tokens_of_other_rows_do_not_leak(model: RecurrentLM) -> None:
    """Nor does a row feel the tokens of another."""
    tokens = random_tokens(2, 130)
    changed = tokens.clone()
    changed[1] = random_tokens(1, 130, seed=8)
    assert_near(model(changed).logits[0], model(tokens).logits[0], 1e-12)


@pytest.mark.parametrize("time", [0, 1, 130])
def test_a_call_keeps_its_state(model: RecurrentLM, time: int) -> None:
    """The state given is not written to, and the one returned shares no memory that is."""
    state = random_state(model, 2)
    before = states.clone(state)
    after = model(random_tokens(2, time), state).state
    kept = states.clone(after)
    model(random_tokens(2, 9), after)
    assert_trees_equal(state, before)
    assert_trees_equal(after, kept)


def test_generate_keeps_its_state(model: RecurrentLM) -> None:
    """Generation does not change its initial state, so a second call gives the same."""
    state = random_state(model, 2)
    before = states.clone(state)
    first = generate(model, random_tokens(2, 3), state, max_new_tokens=12)
    assert_trees_equal(state, before)
    second = generate(model, random_tokens(2, 3), state, max_new_tokens=12)
    assert first.tokens == second.tokens
    assert_trees_equal(first.state, second.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", list(MIXERS))
def test_save_and_load(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, by a model or by a state of the same structure; whatever the batch."""
    model = build_model(kind, dtype=dtype)
    state = random_state(model, 3)
    path = tmp_path / "folder" / "prefix.safetensors"
    states.save(state, path, model=model)
    for like in (model, state, model.init_state(1)):
        loaded = states.load(path, like)
        assert isinstance(loaded, LMState)
        assert isinstance(loaded.layers[0], type(state.layers[0]))
        assert_trees_equal(loaded, state)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_save_of_a_state_in_a_graph(model: RecurrentLM, tmp_path: Path) -> None:
    """A state of a training step, expanded into shared rows, can be saved as it is."""
    state = states.expand(model(random_tokens(1, 4)).state, 3)
    states.save(state, tmp_path / "state")
    assert_trees_equal(states.load(tmp_path / "state", model), state)


def refused(path: Path, like: object) -> str:
    with pytest.raises(UserError) as caught:
        states.load(path, like)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    assert ": " in message, "the remedy follows a colon"
    return message


def test_load_refuses_other_weights(model: RecurrentLM, tmp_path: Path) -> None:
    """A state saved with other weights is refused by its fingerprint."""
    path = tmp_path / "state"
    states.save(random_state(model, 1), path, model=model)
    with torch.no_grad():
        model.embedding.weight[0, 0] += 1e-6
    assert "model" in refused(path, model)


def test_load_refuses_a_state_of_another_version(model: RecurrentLM, tmp_path: Path) -> None:
    """A state of the same model, as its fingerprint says, with other parts than today."""
    state = model.init_state(1)
    path = tmp_path / "state"
    states.save(state._replace(layers=state.layers[:1]), path, model=model)
    refused(path, model)


def test_load_refuses_other_shapes(model: RecurrentLM, tmp_path: Path) -> None:
    """Without a fingerprint, structure, shapes and dtypes are compared."""
    path, kind = tmp_path / "state", model.config.mixer["kind"]
    states.save(random_state(model, 1), path)
    for other in (
        build_model(kind, "sinusoidal", n_layers=3),
        build_model(kind, "sinusoidal", d_model=2 * D_MODEL),
        build_model(kind, "sinusoidal", dtype=torch.float32),
    ):
        assert "model" in refused(path, other)
        assert "model" in refused(path, other.init_state(1))


def test_load_refuses_other_files(tmp_path: Path) -> None:
    """Missing, empty, cut off, text, weights: one sentence that names the file, no traceback."""
    model = build_model()
    good, path = tmp_path / "good", tmp_path / "file"
    states.save(random_state(model, 1), good, model=model)
    assert "state" in refused(path, model)
    assert "state" in refused(tmp_path, model)
    content = good.read_bytes()
    for size in (0, 4, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert "truncated" in refused(path, model)
    path.write_text("this is not a state, but a text that goes on for a while")
    assert "state" in refused(path, model)
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, path)
    assert "state" in refused(path, model)


def test_a_call_refuses_a_state_that_does_not_fit(model: RecurrentLM) -> None:
    """Wrong rows, another width, another depth, another cell: never broadcast."""
    tokens = random_tokens(2, 3)
    for rows in (1, 3):
        with pytest.raises(UserError, match=naming(rows, 2)):
            model(tokens, model.init_state(rows))
    kind = model.config.mixer["kind"]
    others = [build_model(kind, n_layers=3), build_model(kind, d_model=2 * D_MODEL)]
    others += [build_model(name) for name in MIXERS if name not in (kind, "rnn", "gru")]
    for other in others:
        with pytest.raises(UserError):
            model(tokens, other.init_state(2))


def test_a_call_refuses_a_position_of_other_rows(model: RecurrentLM) -> None:
    """The position must have one entry per row."""
    state = model.init_state(2)
    with pytest.raises(UserError, match="rows"):
        model(random_tokens(2, 3), state._replace(position=state.position[:1]))


def test_a_call_refuses_the_state_of_a_mitigation(model: RecurrentLM) -> None:
    """A state with the carry of a mitigation is refused by the plain model."""
    state = model.init_state(2)._replace(extra=(torch.zeros(2),))
    with pytest.raises(UserError, match="mitigation"):
        model(random_tokens(2, 3), state)


def test_histories_of_rows_of_different_lengths() -> None:
    """Joining pads at the front, and a reset clears all entries of its rows only."""
    short = History(torch.arange(6.0).view(1, 1, 3, 2))
    long = History(torch.full((2, 1, 5, 2), torch.nan))
    both = states.join([(short,), (long,)])[0].entries
    assert both.shape == (3, 1, 5, 2)
    assert torch.equal(both[0, :, -3:], short.entries[0])
    assert not both[0, :, :2].any()
    empty = History(torch.zeros(3, 1, 0, 2))
    cleared = states.reset(History(both), empty, torch.tensor([False, True, False])).entries
    assert not cleared[1].any()
    assert torch.equal(cleared[0], both[0])
    assert cleared[2].isnan().all()
