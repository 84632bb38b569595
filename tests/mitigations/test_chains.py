"""Chains of mitigations equal their definition, in any order of the list.

Every ordered pair, with every cell for which both are defined, is compared with the definition per
token in `tests/mitigations/definitions.py`: outputs, final states and all gradients.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrnn.cells import MIXERS, Composed, Edit
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS, Chain, Stage, mitigation
from tests.contracts.builders import (
    DEFINED,
    assert_trees_equal,
    build_mitigated,
    build_model,
    mitigation_spec,
    mixer_spec,
    random_start,
    random_tokens,
    small_chunks,
    spec_id,
    splits,
)
from tests.mitigations.definitions import DEFINITIONS, Defined
from tests.mitigations.test_definitions import assert_as_defined

pytestmark = pytest.mark.core

Spec = dict[str, Any]


def defined(kind: str, mixer: str) -> bool:
    return MITIGATIONS[kind].undefined(MIXERS[mixer]) is None


def both_scan(*kinds: str) -> bool:
    return all(MITIGATIONS[kind].stage is Stage.SCAN for kind in kinds)


PAIRS = [
    (first, second, mixer)
    for first, second, mixer in product(MITIGATIONS, MITIGATIONS, MIXERS)
    if defined(first, mixer) and defined(second, mixer) and not both_scan(first, second)
]


@pytest.mark.parametrize(("first", "second", "mixer"), PAIRS)
@settings(max_examples=2)
@given(
    half=st.integers(2, 12),
    sizes=splits(empty=False, longest=8),
    seed=st.integers(0, 10**6),
    chunk=st.sampled_from([2, 3, 5]),
)
def test_every_ordered_pair_equals_its_definition(
    first: str, second: str, mixer: str, half: int, sizes: list[int], seed: int, chunk: int
) -> None:
    """Values, final states and gradients, at random splits, from a non-zero memory."""
    rest = 2 * half + 1 - sum(sizes)
    pieces = sizes + [rest] * (rest > 0) + [1] * (rest <= 0 and sum(sizes) % 2 == 0)
    assert sum(pieces) % 2 == 1
    with small_chunks(chunk, 2):
        specs = [mitigation_spec(first), mitigation_spec(second)]
        assert_as_defined(specs, mixer, pieces, batch=2, seed=seed)


LONG = [
    [mitigation_spec(kind) for kind in MITIGATIONS if kind != "sliding_window"],
    [mitigation_spec(kind) for kind in reversed(list(MITIGATIONS)) if kind != "state_norm"],
    [
        mitigation_spec("token_filter"),
        mitigation_spec("forget_more") | {"heads": [1, 2]},
        mitigation_spec("scale_delta") | {"layers": [1]},
        mitigation_spec("forget_more"),
        mitigation_spec("power_decay") | {"heads": [[0, 1]]},
    ],
]


@pytest.mark.parametrize("specs", LONG, ids=["forwards", "backwards", "some heads"])
def test_long_chains_equal_their_definition(specs: list[Spec]) -> None:
    """With all mitigations at once, and with parts that change different heads."""
    with small_chunks(4, 2):
        assert_as_defined(specs, "mamba2", [1, 20, 4], batch=2)


@pytest.mark.parametrize(
    ("first", "second", "mixer"),
    [pair for pair in PAIRS if MITIGATIONS[pair[0]].stage is not MITIGATIONS[pair[1]].stage],
)
def test_the_order_of_stages_is_fixed(first: str, second: str, mixer: str) -> None:
    """Members of different stages give the same model, bit for bit, in both orders."""
    specs = [mitigation_spec(first), mitigation_spec(second)]
    one, other = build_mitigated(specs, mixer), build_mitigated(specs[::-1], mixer)
    assert one.fingerprint() == other.fingerprint()
    assert_trees_equal(one(random_tokens(1, 9)), other(random_tokens(1, 9)))


def outputs(*specs: Spec) -> Tensor:
    return build_mitigated(specs)(random_tokens(2, 40)).logits


def test_the_filter_compares_steps_scaled_by_earlier_members() -> None:
    """`scale_delta` before the filter changes what it compares; scaling rates does not."""
    threshold, scaled = mitigation_spec("token_filter"), mitigation_spec("scale_delta")
    s = scaled["scale"]
    after = outputs(scaled, threshold)
    assert not torch.allclose(after, outputs(threshold, scaled))
    same = outputs(threshold | {"threshold": threshold["threshold"] / s}, scaled)
    torch.testing.assert_close(after, same, rtol=1e-11, atol=1e-12)
    for kind in ("scale_decay", "power_decay", "forget_more"):
        other = mitigation_spec(kind)
        torch.testing.assert_close(outputs(other, threshold), outputs(threshold, other))


@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_the_stage_is_where_the_edit_acts(spec: Spec, mixer: Spec) -> None:
    """An edit overrides only the hooks of its mitigation's stage."""
    hooks = {
        Stage.STEPS: {"edit_steps"},
        Stage.MULTIPLIERS: {"edit_inputs", "edit_update"},
        Stage.SCAN: {"scan", "advance"},
    }
    member = mitigation(spec)
    assert not isinstance(member, Chain)
    cell = build_model(mixer).cells[0]
    edit = member.bind(0, cell, torch.ones(cell.n_heads, dtype=torch.bool))
    names = set().union(*hooks.values())
    overridden = {name for name in names if getattr(type(edit), name) is not getattr(Edit, name)}
    assert overridden == (set() if spec["kind"] == "none" else hooks[member.stage])
    assert edit.redefines_recurrence == (member.stage is Stage.SCAN)


def test_only_one_redefines_the_recurrence() -> None:
    """Two are refused when a chain is built and when edits are composed."""
    specs = [mitigation_spec("state_norm"), mitigation_spec("sliding_window")]
    with pytest.raises(UserError):
        mitigation(specs)
    cell, heads = build_model().cells[0], torch.ones(4, dtype=torch.bool)
    edits = [mitigation(spec).bind(0, cell, heads) for spec in specs]  # type: ignore[union-attr]
    with pytest.raises(UserError):
        Composed([edits[0], Composed([edits[1]])])
    assert Composed([Composed([Edit()]), edits[0]]).redefines_recurrence


def test_options_are_frozen_values() -> None:
    """A mitigation can be compared, hashed and described, and cannot be changed."""
    spec = {"kind": "state_norm", "threshold": [[1.0, None], 2], "heads": [[0, 1]], "layers": [0]}
    one, other = mitigation(spec), mitigation(spec)
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == "state_norm(threshold=[[1.0, None], 2.0], layers=[0], heads=[[0, 1]])"
    assert mitigation(str(one).replace("None", "null")) == one
    assert one != mitigation(spec | {"layers": None})
    with pytest.raises(AttributeError):
        one.threshold = 3.0  # type: ignore[union-attr, misc]


def test_every_mitigation_has_a_definition() -> None:
    """Every mitigation has a definition per token, and test options that change a small model."""
    assert DEFINITIONS.keys() == MITIGATIONS.keys()
    for kind, member in DEFINITIONS.items():
        assert (member is Defined) == (kind == "none")
    tokens = random_tokens(2, 40)
    for kind in MITIGATIONS:
        ours = build_mitigated([mitigation_spec(kind)])
        start = random_start(ours, 2)
        plain = ours.model(tokens, start._replace(extra=()))
        same = torch.allclose(ours(tokens, start).logits, plain.logits)
        assert same == (kind == "none"), kind


def test_every_pair_is_covered() -> None:
    """The pairs above contain both orders of each pair, and all mitigations and cells."""
    assert {(second, first, mixer) for first, second, mixer in PAIRS} == set(PAIRS)
    assert {first for first, _, mixer in PAIRS if mixer == "mamba2"} == set(MITIGATIONS)
    assert {mixer for *_, mixer in PAIRS} == set(MIXERS)
    assert mixer_spec("mamba2")["n_groups"] > 1
