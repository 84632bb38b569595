"""Every mitigation equals its definition per token in float64, with every gradient.

The tests compare outputs, final state, and gradients of parameters and initial state, for a model
of two layers and the definitions in `tests/mitigations/definitions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.mitigations import Mitigated
from longrnn.models import RecurrentLM
from longrnn.ops.ssd.window_carry import WindowCarry
from longrnn.state import LMState
from tests.contracts.builders import (
    BLOCK_KINDS,
    DEFINED,
    assert_near,
    build_mitigated,
    build_model,
    differentiable,
    gradients,
    mixer_spec,
    parameters,
    random_state,
    random_tokens,
    real_leaves,
    recurrent,
    small_chunks,
    spec_id,
    splits,
)
from tests.mitigations.definitions import Reference, Spec, StateNorm

pytestmark = pytest.mark.core

TOLERANCE = 1e-11
seeds = st.integers(0, 10**6)
Run = Callable[[Tensor, LMState], tuple[Tensor, LMState]]


def outcome(
    model: RecurrentLM, run: Run, pieces: Sequence[Tensor], start: LMState, cut: int | None = None
) -> dict[str, Tensor]:
    """Outputs, final state and gradients of a run in pieces.

    Args:
        start: the initial state; its `extra` is the carry that `run` starts with.
        cut: the state is detached before the piece with this index.
    """
    state = differentiable(start._replace(extra=()))
    inputs = {**real_leaves(state, "state."), **parameters(model)}
    logits, after = [], state._replace(extra=start.extra)
    for number, piece in enumerate(pieces):
        if number == cut:
            after = states.detach(after)
            if isinstance(run, Reference):
                run.detach()
        part, after = run(piece, after)
        logits.append(part if cut is None or number >= cut else part.detach())
    final = after._replace(extra=())
    found = {"logits": torch.cat(logits, 1), "position": final.position}
    found |= real_leaves(final, "final ")
    return found | gradients((found["logits"], final), inputs)


def assert_as_defined(
    specs: Sequence[Spec],
    mixer: str | Spec,
    sizes: Sequence[int],
    *,
    batch: int = 1,
    seed: int = 0,
    cut: int | None = None,
    **config: Any,
) -> Reference:
    """Checks a model in pieces against the loop over all tokens, from non-zero memories."""
    ours = build_mitigated(specs, mixer, seed=seed, **config)
    theirs = Reference(recurrent(ours), specs)
    tokens, start = (
        random_tokens(batch, sum(sizes), seed),
        random_state(recurrent(ours), batch, seed),
    )
    whole = [sum(sizes)] if cut is None else [sum(sizes[:cut]), sum(sizes[cut:])]
    expected = outcome(
        recurrent(ours), theirs, tokens.split(whole, 1), start, None if cut is None else 1
    )
    begin = start._replace(extra=ours.init_state(batch).extra)
    actual = outcome(recurrent(ours), ours, tokens.split(list(sizes), 1), begin, cut)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_near(actual[name], tensor, TOLERANCE, name, scale=1e-9)
    return theirs


@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
@settings(max_examples=3)
@given(
    sizes=splits(empty=False, longest=50),
    batch=st.integers(1, 3),
    seed=seeds,
    block=st.sampled_from(BLOCK_KINDS),
    chunk=st.sampled_from([1, 2, 3, 4, 7, 64]),
    together=st.integers(1, 3),
)
def test_every_pair_equals_its_definition(
    spec: Spec,
    mixer: Spec,
    sizes: list[int],
    batch: int,
    seed: int,
    block: str,
    chunk: int,
    together: int,
) -> None:
    """Every mitigation with every cell for which it is defined, at random splits."""
    with small_chunks(chunk, together):
        assert_as_defined([spec], mixer, sizes, batch=batch, seed=seed, block=block)


WIDE = {"kind": "mamba2", "d_state": 3, "head_dim": 2, "n_groups": 4}
ONE_GROUP = {"kind": "mamba2", "d_state": 5, "head_dim": 8, "backend": "reference", "d_conv": 1}


@settings(max_examples=8)
@given(
    r=st.integers(1, 60),
    sizes=splits(empty=False, longest=70),
    seed=seeds,
    chunk=st.integers(1, 9),
    together=st.integers(1, 3),
    mixer=st.sampled_from([ONE_GROUP, ONE_GROUP | {"head_dim": 4}]),
)
def test_windows_of_many_chunks(
    r: int, sizes: list[int], seed: int, chunk: int, together: int, mixer: Spec
) -> None:
    """Windows from one token to more than the text, of less than one chunk to many chunks."""
    with small_chunks(chunk, together):
        spec = {"kind": "sliding_window", "window": r}
        assert_as_defined([spec], mixer, sizes, seed=seed, n_layers=1)


@pytest.mark.parametrize(
    ("r", "sizes"),
    [
        (1, [131]),
        (63, [1, 1, 1, 126, 66, 7]),
        (64, [64, 64, 64, 1]),
        (65, [200]),
        (130, [3, 126, 63, 150]),
        (333, [1, 400, 50]),
        (500, [90, 1, 101]),
    ],
)
def test_windows_with_the_default_chunk_size(r: int, sizes: list[int]) -> None:
    """Windows below, at and above a chunk, and longer than the text."""
    spec = {"kind": "sliding_window", "window": r}
    assert_as_defined([spec], ONE_GROUP, sizes, n_layers=1)


@pytest.mark.parametrize("options", [{}, {"layers": [0]}, {"heads": [0, 1, 2, 3]}], ids=str)
def test_windows_of_all_heads_in_groups(options: Spec) -> None:
    """The window applies to all heads, which share B within a group, or to some of them."""
    spec = {"kind": "sliding_window", "window": 6, **options}
    for mixer in ("mamba2", WIDE | {"head_dim": 4}):
        with small_chunks(4, 2):
            assert_as_defined([spec], mixer, [1, 20, 4, 9], batch=2)


@pytest.mark.parametrize(("r", "chunk"), [(7, 1), (9, 9), (30, 7), (150, 80)])
def test_the_length_of_chunks_changes_no_result(r: int, chunk: int) -> None:
    """But the number of states in the carry."""
    spec = {"kind": "sliding_window", "window": r, "chunk": chunk}
    assert_as_defined([spec], ONE_GROUP, [1, 90, 4, 30], n_layers=1)
    model = build_mitigated([spec], ONE_GROUP, n_layers=1)
    carries: Any = model.edits[0].init_carry(model.mixers[0], 1)
    (carry,) = [one for one in carries if isinstance(one, WindowCarry)]
    assert len(carry.front) == r // chunk - 1


def test_a_cell_without_chunks_refuses_their_length() -> None:
    with pytest.raises(UserError, match="chunk"):
        build_mitigated([{"kind": "sliding_window", "window": 9, "chunk": 4}], "lstm")


@pytest.mark.parametrize("mixer", ["lstm", "gru"])
@pytest.mark.parametrize("r", [1, 2, 40, 200])
def test_windows_of_gated_cells(mixer: str, r: int) -> None:
    """Texts of several window blocks, and a window longer than the text."""
    spec = {"kind": "sliding_window", "window": r}
    assert_as_defined([spec], mixer, [1, 1, 88, 3, 37], batch=2)


def norms(mixer: str | Spec, time: int) -> Tensor:
    """Norms of the memories of the first layer, from zero and without a limit, `(t, h)`."""
    model = build_model(mixer)
    reference = Reference(model, [{"kind": "state_norm", "threshold": 1e30}])
    with torch.no_grad():
        reference(random_tokens(1, time), model.init_state(1))
    return torch.stack(norm_definition(reference).norms)[:, 0, :, 0, 0]


def norm_definition(reference: Reference) -> StateNorm:
    """The definition of the `state_norm` in the first layer."""
    (member,) = reference.chains[0].members
    assert isinstance(member, StateNorm)
    return member


@pytest.mark.parametrize("kind", ["mamba2", "lstm", "gru", "rnn"])
@pytest.mark.parametrize("share", ["none", "some", "all"])
def test_thresholds_for_no_some_and_all_tokens(kind: str, share: str) -> None:
    """Limits that no token, some tokens and all tokens reach."""
    sizes = [1, 64, 70, 2, 11] if kind == "mamba2" else [1, 30, 2]
    plain = norms(kind, sum(sizes))
    limit = {"none": 10 + plain.max(), "some": plain.median(), "all": 1e-4 * plain.min()}[share]
    spec = {"kind": "state_norm", "threshold": float(limit)}
    reference = assert_as_defined([spec], kind, sizes)
    rescaled = torch.stack(norm_definition(reference).rescaled).double().mean()
    if share == "some":
        assert 0.02 < rescaled < 0.98
    else:
        assert rescaled == (share == "all")


@settings(max_examples=8)
@given(
    level=st.floats(0.01, 1.5),
    sizes=splits(empty=False, longest=60),
    seed=seeds,
    chunk=st.integers(1, 9),
    mixer=st.sampled_from([mixer_spec("mamba2"), WIDE, ONE_GROUP]),
)
def test_any_threshold(level: float, sizes: list[int], seed: int, chunk: int, mixer: Spec) -> None:
    """Rescaled and plain chunks may alternate in any order."""
    with small_chunks(chunk, 2):
        spec = {"kind": "state_norm", "threshold": level}
        assert_as_defined([spec], mixer, sizes, batch=2, seed=seed, n_layers=1)


HEADS = [
    {"layers": [1]},
    {"layers": []},
    {"heads": [0, 2]},
    {"heads": [3], "layers": [0]},
    {"heads": [[0, 1], [1, 3], [1, 2]]},
    {"heads": [[0, 1], [1, 3]], "layers": [1]},
    {"heads": []},
]
# One number, by layer, by layer and head; null leaves alone.
NUMBERS: list[tuple[str, str, Any]] = [
    ("state_norm", "threshold", [0.4, None]),
    ("state_norm", "threshold", [[0.4, None, 0.2, 3.0], 0.5]),
    ("forget_more", "decay_scale", [[0.9, None, 0.99, 1.0], None]),
    ("forget_more", "input_scale", [0.5, [None, 0.1, 1.0, 0.7]]),
    ("scale_delta", "scale", [None, [0.5, 2.0, None, 1.0]]),
    ("scale_decay", "scale", [3.0, [0.5, 2.0, None, 1.0]]),
    ("token_filter", "threshold", [[0.05, None, 0.1, 0.0], None]),
]
KINDS = [spec for spec, mixer in DEFINED if mixer["kind"] == "mamba2" and len(spec) > 1]


@pytest.mark.parametrize("mixer", [mixer_spec("mamba2"), WIDE | {"head_dim": 4}], ids=spec_id)
@pytest.mark.parametrize("some", HEADS, ids=str)
@pytest.mark.parametrize("spec", KINDS, ids=spec_id)
def test_some_heads(spec: Spec, some: Spec, mixer: Spec) -> None:
    """Only the selected layers, heads and pairs are changed, with and without groups."""
    assert_as_defined([spec | some], mixer, [1, 20, 4])


@pytest.mark.parametrize(("kind", "option", "numbers"), NUMBERS, ids=str)
def test_lists_of_numbers(kind: str, option: str, numbers: Any) -> None:
    """Options may have a number for each layer, or for each layer and head."""
    spec = {"kind": kind, **MITIGATION_REST.get((kind, option), {}), option: numbers}
    assert_as_defined([spec], "mamba2", [1, 20, 4])


MITIGATION_REST = {
    ("forget_more", "decay_scale"): {"input_scale": 0.75},
    ("forget_more", "input_scale"): {"decay_scale": 1.0},
}


@pytest.mark.parametrize("kind", ["state_norm", "forget_more", "sliding_window"])
def test_layers_of_a_gated_cell(kind: str) -> None:
    """A cell without heads counts as one head."""
    spec = next(spec for spec, _ in DEFINED if spec["kind"] == kind)
    for some in ({"layers": [1]}, {"heads": [0], "layers": [0]}, {"heads": [[1, 0]]}):
        assert_as_defined([spec | some], "lstm", [1, 20, 4])


@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_truncated_gradients(spec: Spec, mixer: Spec) -> None:
    """Detaching a state removes all earlier gradients, including those through a window."""
    with small_chunks(4, 2):
        assert_as_defined([spec], mixer, [9, 6, 1, 20], cut=2)


IDENTITY: dict[str, list[Spec]] = {
    "none": [{}],
    "forget_more": [{"decay_scale": 1.0, "input_scale": 1.0}],
    "state_norm": [{"threshold": 1e6}, {"threshold": [None, [None]]}, {"threshold": float("inf")}],
    "sliding_window": [{"window": 150}],
    "scale_delta": [{"scale": 1.0}],
    "scale_decay": [{"scale": 1.0}],
    "power_decay": [{"scale": 1.0}],
    "token_filter": [{"threshold": 0.0}],
}


@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_identity_options_change_nothing(spec: Spec, mixer: Spec) -> None:
    """Neutral numbers, and a mitigation of no layer, give the plain model."""
    plain = build_model(mixer)
    heads = plain.mixers[0].n_heads
    tokens, state = random_tokens(2, 140), plain.init_state(2)
    expected = plain(tokens, state)
    variants = IDENTITY[spec["kind"]] + [spec | {"layers": []}] * (spec["kind"] != "none")
    for options in variants:
        if options.get("threshold") == [None, [None]]:
            options = {"threshold": [None, [None] * heads]}
        ours = build_mitigated([spec | options], mixer)
        logits, after = ours(tokens)
        assert_near(logits, expected.logits, TOLERANCE, str(options))
        for name, leaf in real_leaves(after._replace(extra=()), "").items():
            assert_near(leaf, dict(states.leaves(expected.state))[name], TOLERANCE, name)


def test_every_kind_has_a_definition() -> None:
    """The tables above contain every mitigation."""
    assert {spec["kind"] for spec, _ in DEFINED} == IDENTITY.keys()


def test_the_comparison_detects_a_difference() -> None:
    """A slightly different option gives a difference above the tolerance."""
    spec = {"kind": "forget_more", "decay_scale": 0.9, "input_scale": 1.0}
    ours = build_mitigated([spec])
    assert isinstance(ours, Mitigated)
    theirs = Reference(recurrent(ours), [spec | {"decay_scale": 0.9001}])
    tokens = random_tokens(1, 20)
    logits, _ = theirs(tokens, ours.model.init_state(1))
    assert (ours(tokens).logits - logits).abs().max() > 1e-8
