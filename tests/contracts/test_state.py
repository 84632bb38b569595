"""A state is a value: kept, forked, saved and reused, and never changed by its readers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import state as states
from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.mitigations import SlidingWindow, mitigation
from longrnn.models import RecurrentLM, generate
from longrnn.state import LMState, leaves
from tests.contracts.builders import (
    D_MODEL,
    assert_near,
    assert_trees_equal,
    build_mitigated,
    build_model,
    differentiable,
    random_tokens,
)
from tests.contracts.subjects import cell_leaves, functional, started
from tests.refusals import naming

pytestmark = pytest.mark.core

WINDOW = {"kind": "sliding_window", "window": 5}
BUILDS: dict[str, Callable[..., RecurrentLM]] = {
    **{kind: lambda kind=kind, **how: build_model(kind, "sinusoidal", **how) for kind in MIXERS},
    "window of an lstm": lambda **how: build_mitigated([WINDOW], "lstm", **how),
    "window of a mamba2": lambda **how: build_mitigated([WINDOW], **how),
    "window of one head": lambda **how: build_mitigated([WINDOW | {"heads": [1]}], **how),
}


@pytest.fixture(params=BUILDS)
def model(request: pytest.FixtureRequest) -> RecurrentLM:
    return BUILDS[request.param]()


def next_logits(model: RecurrentLM, state: LMState) -> Tensor:
    return model(random_tokens(len(state.position), 70, seed=5), state).logits


def test_rows_are_taken_repeated_and_joined(model: RecurrentLM) -> None:
    state, rows = started(model, 3), [2, 0, 0]
    taken = states.take(state, rows)
    assert_trees_equal(states.take(state, torch.tensor(rows)), taken)
    assert_trees_equal(taken, states.tree_map(lambda leaf: leaf[rows], state))
    tokens = random_tokens(3, 70)
    assert_near(model(tokens[rows], taken).logits, model(tokens, state).logits[rows], 1e-12)
    assert_trees_equal(states.expand(state, 2), states.take(state, [0, 0, 1, 1, 2, 2]))
    parts = [states.take(state, [row]) for row in range(3)]
    assert_trees_equal(states.join(parts), state)
    mask = torch.tensor([True, False, True])
    assert_trees_equal(states.take(state, mask), states.take(state, [0, 2]))


def test_rows_that_have_read_different_numbers_of_tokens_are_joined(model: RecurrentLM) -> None:
    """Each goes on as it does alone, also after some rows were reset."""
    alone = [model(random_tokens(1, time, seed=time)).state for time in (2, 9, 4)]
    together, tokens = states.join([model.init_state(1), *alone]), random_tokens(4, 20, seed=3)
    logits, after = model(tokens, together)
    for row, own in enumerate([None, *alone]):
        expected = model(tokens[[row]], own)
        assert_near(logits[[row]], expected.logits, 1e-10)
        found = cell_leaves(model, states.take(after, [row]))
        for name, leaf in cell_leaves(model, expected.state).items():
            assert_near(found[name], leaf, 1e-10, name)
    where = torch.tensor([False, False, True, False])
    anew = states.reset(after, model.init_state(4), where)
    found, whole = model(tokens, anew).logits, model(tokens, after).logits
    assert_near(found[[2]], model(tokens[[2]]).logits, 1e-10)
    assert_near(found[~where], whole[~where], 1e-10)


def test_a_reset_lets_no_nan_survive(model: RecurrentLM) -> None:
    state, initial = started(model, 3), model.init_state(3)
    where = torch.tensor([False, True, False])
    broken = differentiable(state)
    sources = [leaf for _, leaf in leaves(broken) if leaf.requires_grad]
    with torch.no_grad():
        for leaf in sources:
            leaf[1] = torch.nan
    after = states.reset(broken, initial, where)
    assert_trees_equal(states.take(after, [0, 2]), states.take(state, [0, 2]))
    assert_near(next_logits(model, after)[1:2], next_logits(model, initial)[1:2], 1e-12)
    loss = functional(next_logits(model, after), 1)
    for gradient in torch.autograd.grad(loss, sources, materialize_grads=True):
        assert gradient.isfinite().all()
        assert (gradient[1] == 0).all()


def test_detach_and_clone(model: RecurrentLM) -> None:
    after = model(random_tokens(2, 5)).state
    assert any(leaf.requires_grad for _, leaf in leaves(after))
    detached = states.detach(after)
    assert not any(leaf.requires_grad for _, leaf in leaves(detached))
    assert_trees_equal(detached, after)
    copy = states.clone(detached)
    for _, leaf in leaves(copy):
        leaf.zero_()
    assert_trees_equal(detached, after)


def test_a_state_holds_no_more_memory_than_its_tensors(model: RecurrentLM) -> None:
    """It does not grow with the text, and does not keep the inputs of a long call alive."""
    with torch.no_grad():
        after = model(random_tokens(2, 250)).state
        assert states.nbytes(model(random_tokens(2, 9)).state) == states.nbytes(after)
    assert states.nbytes(after) == sum(leaf.numel() * leaf.itemsize for _, leaf in leaves(after))
    held = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for _, leaf in leaves(after)}
    assert sum(one.nbytes() for one in held.values()) <= 2 * states.nbytes(after)


@pytest.mark.parametrize("time", [0, 1, 130])
def test_a_call_keeps_its_state(model: RecurrentLM, time: int) -> None:
    state = started(model, 2)
    before = states.clone(state)
    with torch.no_grad():
        after = model(random_tokens(2, time), state).state
        kept = states.clone(after)
        for _ in range(3):
            model(random_tokens(2, 9), after)
            generate(model, random_tokens(2, 1), after, max_new_tokens=3)
    assert_trees_equal(state, before)
    assert_trees_equal(after, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", BUILDS)
def test_save_and_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = BUILDS[name](dtype=dtype)
    state = states.expand(states.join([started(model, 2), model.init_state(1)]), 2)
    path = tmp_path / "folder" / "prefix.safetensors"
    states.save(state, path, model=model)
    loaded = states.load(path, model)
    assert type(loaded.layers[0]) is type(state.layers[0])
    assert_trees_equal(loaded, state)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    states.save(model(random_tokens(1, 4)).state, path)  # in a graph, and without a fingerprint
    assert states.load(path, model).position.tolist() == [4]


def refused(path: Path, model: Any) -> str:
    with pytest.raises(UserError) as caught:
        states.load(path, model)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_load_refuses_the_state_of_another_model(model: RecurrentLM, tmp_path: Path) -> None:
    path, plain = tmp_path / "state", model.under(None)
    states.save(started(model, 1), path, model=model)
    others = [model.under(mitigation("state_norm(threshold=3)")) for _ in [0] if model is plain]
    if model.mitigation is not None:
        others.append(plain)
        window = model.mitigation.parts[0]
        others.append(plain.under(mitigation({**WINDOW, "window": 6, "heads": window.heads})))
    for other in others:
        assert "fingerprint" in refused(path, other)
    with torch.no_grad():
        plain.embedding.weight[0, 0] += 1e-6
    assert "fingerprint" in refused(path, model)


def test_a_model_starts_from_the_state_of_a_file(model: RecurrentLM, tmp_path: Path) -> None:
    path, tokens = tmp_path / "state", random_tokens(2, 9)
    state = started(model, 1)
    states.save(state, path, model=model)
    starting = model.starting_from(states.load_start(path, model))
    expected = model(tokens, states.expand(state, 2))
    assert torch.equal(starting(tokens).logits, expected.logits)
    assert_trees_equal(starting.init_state(2), states.expand(state, 2))
    assert starting.fingerprint() != model.fingerprint()
    assert starting.starting_from(None).fingerprint() == model.fingerprint()
    # States of the two models are those of one model.
    states.save(starting(tokens).state, path, model=starting)
    assert_trees_equal(states.load(path, model), expected.state)


def test_a_start_fits_its_weights_in_any_dtype_alone(tmp_path: Path) -> None:
    """Under any mitigation without a window; other weights and several rows are refused."""
    model, path, tokens = build_model("mamba2"), tmp_path / "state", random_tokens(2, 9)
    state = started(model, 1)
    states.save(state, path, model=model)
    for dtype in (torch.float32, torch.bfloat16):
        other = build_model("mamba2").to(dtype)
        found = other.starting_from(states.load_start(path, other))(tokens).logits
        assert_near(
            found,
            model(tokens, states.expand(state, 2)).logits,
            1e-5 if dtype == torch.float32 else 0.1,
        )
    limited = model.under(mitigation("state_norm(threshold=1)"))
    limited.starting_from(states.load_start(path, limited))(tokens)
    windowed = model.under(mitigation(WINDOW))
    for refusing in (windowed, build_model("mamba2", seed=1)):
        with pytest.raises(UserError, match="state of another model"):
            states.load_start(path, refusing)
    with pytest.raises(UserError, match="state of another model"):
        model.starting_from(state).under(mitigation(WINDOW))
    states.save(states.expand(state, 2), path, model=model)
    with pytest.raises(UserError, match="2 rows"):
        states.load_start(path, model)


def test_load_refuses_other_structures(model: RecurrentLM, tmp_path: Path) -> None:
    path, kind = tmp_path / "state", model.config.mixer["kind"]
    states.save(started(model, 1), path)
    others = [{"n_layers": 3}, {"d_model": 2 * D_MODEL}, {"dtype": torch.float32}]
    for other in (build_model(kind, **how) for how in others):
        assert "model" in refused(path, other)


@pytest.mark.parametrize("kind", ["mamba2", "lstm"])
def test_the_state_of_another_window_is_refused(kind: str, tmp_path: Path) -> None:
    plain, tokens, path = build_model(kind), random_tokens(2, 9), tmp_path / "state"
    specs = [WINDOW, WINDOW | {"window": 6}]
    if kind == "mamba2":
        specs += [WINDOW | {"heads": heads} for heads in ([0], [1], [0, 1], [[0, 1], [1, 0]])]
    models = [plain.under(mitigation(spec)) for spec in specs]
    for model in models:
        state = model(tokens).state
        states.save(state, path)
        for other in models:
            if other is model:
                other(tokens, states.load(path, other))
                continue
            with pytest.raises(UserError, match="init_state"):
                other(tokens, state)
            assert "init_state" in refused(path, other)


@pytest.mark.parametrize("path", ["nul\0", "x" * 300, "file/beside", "."])
def test_a_state_that_cannot_be_written_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        states.save(build_model().init_state(1), tmp_path / path)


def test_load_refuses_other_files(tmp_path: Path) -> None:
    """Missing, cut off, with a flipped bit, text, weights: one sentence that names the file."""
    model = build_model()
    good, path = tmp_path / "good", tmp_path / "file"
    states.save(started(model, 1), good, model=model)
    assert "state" in refused(path, model)
    assert "state" in refused(tmp_path, model)
    content = good.read_bytes()
    damaged = [content[:size] for size in (0, 4, 100, len(content) // 2, len(content) - 1)]
    for place in range(0, len(content), max(1, len(content) // 99)):
        flipped = bytes([content[place] ^ 1 << place % 8])
        damaged.append(content[:place] + flipped + content[place + 1 :])
    for other in damaged:
        path.write_bytes(other)
        assert "state" in refused(path, model)
    path.write_text("this is not a state, but a text that goes on for a while")
    assert "state" in refused(path, model)
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, path)
    assert "state" in refused(path, model)


def test_a_call_refuses_a_state_that_does_not_fit(model: RecurrentLM) -> None:
    """Other rows, widths, depths, cells and dtypes, and windows: never broadcast."""
    tokens, kind = random_tokens(2, 3), model.config.mixer["kind"]
    for rows in (1, 3):
        with pytest.raises(UserError, match=naming(rows, 2)):
            model(tokens, model.init_state(rows))
    others: list[Any] = [build_model(kind, n_layers=3), build_model(kind, d_model=2 * D_MODEL)]
    others += [build_model(kind, dtype=torch.float32)]
    others += [build_model(name) for name in MIXERS if name not in (kind, "rnn", "gru")]
    if model.mitigation is not None:
        others += [model.under(None)]
    if kind == "mamba2" and "heads" not in str(model.mitigation):
        others += [build_mitigated([WINDOW | {"heads": [1]}])]
    elif model.mitigation is None and SlidingWindow.undefined(MIXERS[kind]) is None:
        others += [build_mitigated([WINDOW], kind)]
    for other in others:
        with pytest.raises(UserError, match="init_state"):
            model(tokens, other.init_state(2))
    state = model.init_state(2)
    positions: list[Any] = [state.position[:1], state.position.float(), state.position[:, None], 0]
    for position in positions:
        with pytest.raises(UserError, match="position|rows"):
            model(tokens, state._replace(position=position))
