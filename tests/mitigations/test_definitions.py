"""Every mitigation, and every pair of them, equals its definition per token, with every gradient.

The tests compare outputs, final states, and gradients of parameters and initial states, for a model
of one or two layers and the definitions in `tests/mitigations/definitions.py`.
"""

import copy
import math
import random
import re
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import state as states
from longrnn.cells import MIXERS, EditedState
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.models import RecurrentLM
from longrnn.state import LMState
from tests.contracts.builders import (
    DEFINED,
    KINDS_OF_CELLS,
    MORE_MIXERS,
    Spec,
    assert_near,
    build_mitigated,
    differentiable,
    mitigation_spec,
    mixer_spec,
    random_sizes,
    random_state,
    random_tokens,
    spec_id,
)
from tests.contracts.subjects import (
    BACKENDS,
    assert_same,
    cell_leaves,
    outcome,
    outcome_of,
    read,
    small_chunks,
)
from tests.mitigations.definitions import DEFINITIONS, Defined, Reference, StateNorm
from tests.sampling import sampled

pytestmark = pytest.mark.core

SLOW = pytest.mark.slow
MAMBA2 = mixer_spec("mamba2")
WIDE = {"kind": "mamba2", "d_state": 3, "head_dim": 2, "n_groups": 4}  # 8 heads
ONE_GROUP = {"kind": "mamba2", "d_state": 5, "head_dim": 8, "d_conv": 1}
# In float32 gradients are sums over many tokens of rounded numbers.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
Case = tuple[list[Spec], Spec]


def with_memories(model: RecurrentLM, plain: LMState) -> LMState:
    """The state of a plain model as one of a mitigated model whose windows hold no input."""
    empty = model.init_state(len(plain.position))
    layers = [
        own._replace(state=given) if isinstance(own, EditedState) else given
        for own, given in zip(empty.layers, plain.layers, strict=True)
    ]
    return LMState(plain.position, tuple(layers))


def defined_outcome(reference: Reference, tokens: Tensor, state: LMState) -> dict[str, Tensor]:
    """What `tests.contracts.subjects.outcome` gives, by definition."""
    start = differentiable(state)
    logits, after = reference(tokens, start)
    return outcome_of(reference.model, logits, start, after)


def assert_as_defined(
    specs: list[Spec],
    mixer: Spec,
    dtype: torch.dtype = torch.float64,
    *,
    time: int = 20,
    seed: int = 0,
    level: float = 1.0,
    **config: Any,
) -> Reference:
    """Checks a model in pieces against the loop over all tokens, from random memories."""
    ours = build_mitigated(specs, mixer, dtype=dtype, seed=seed, **config)
    exact = build_mitigated([], mixer, dtype=dtype, seed=seed, **config).double()
    reference = Reference(exact, specs)
    tokens, plain = random_tokens(2, time, seed), random_state(ours.under(None), 2, seed)
    start = with_memories(ours, plain)
    wide = states.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, plain)
    expected = defined_outcome(reference, tokens, wide)
    values = {name: one for name, one in expected.items() if not name.startswith("gradient")}
    # The contracts compare the gradients of splits.
    whole, parts = ([time], random_sizes(time, seed + 1))[:: 1 - 2 * (seed % 2)]
    with small_chunks(4):
        found = outcome(ours, tokens, start, parts)
        # The own state of a cell under a window is a part of that of the layer.
        found = {re.sub(r"(layers\.\d+)\.state\.", r"\1.", n): v for n, v in found.items()}
        found = {name: found[name] for name in expected}
        assert_same(found, expected, dtype, TOLERANCE[dtype])
    with torch.no_grad():
        logits, after = read(ours, tokens, start, whole)
    found = {"logits": logits, "position": after.position, **cell_leaves(ours, after)}
    assert_same(found, values, dtype, TOLERANCE[dtype])
    return reference


def cases() -> dict[str, Case]:
    """Every mitigation with every cell and backend; pairs, chains, heads, numbers and sizes."""
    found: list[tuple[str, list[Spec], Spec]] = []

    def add(name: str, specs: list[Spec], mixer: Spec = MAMBA2) -> None:
        found.append((name, specs, mixer))

    for spec, mixer in DEFINED:
        for backend in BACKENDS if mixer["kind"] == "mamba2" else [""]:
            how = {"backend": backend} if backend else {}
            add(f"{spec['kind']} {mixer['kind']} {backend}".strip(), [spec], mixer | how)
    for mixer in (*MORE_MIXERS, NORM):
        add(spec_id(mixer), [], mixer)
    for name, specs, mixer in pairs():
        add(name, specs, mixer)
    kinds = [spec["kind"] for spec, mixer in DEFINED if mixer["kind"] == "mamba2"][1:]
    for number, some in enumerate(HEADS):
        for kind in (kinds[number % len(kinds)], ("sliding_window", "state_norm")[number % 2]):
            add(f"{kind} {some}", [mitigation_spec(kind) | some], (MAMBA2, WIDE)[number % 2])
    for number, (kind, options) in enumerate(NUMBERS):
        add(f"numbers {number}", [{"kind": kind, **options}])
        if kind in STEPS | {"forget_more"}:  # decays per key, and rates per token
            add(f"numbers {number} kda", [{"kind": kind, **options}], FOUR_HEADS)
            add(f"numbers {number} mamba3", [{"kind": kind, **options}], mixer_spec("mamba3"))
    for kind in ("scale_decay", "power_decay"):  # rates per key
        add(f"numbers {kind} mamba", [{"kind": kind, "scale": PER_CHANNEL}], mixer_spec("mamba"))
    for window, mixer in ((1, ONE_GROUP), (2, WIDE), (9, ONE_GROUP), (40, MAMBA2)):
        add(f"window {window}", [{"kind": "sliding_window", "window": window}], mixer)
    for kind in ("lstm", "gru"):
        for window in (1, 2, 40):
            spec = {"kind": "sliding_window", "window": window}
            add(f"window {window} {kind}", [spec], {"kind": kind})
        some = [{"layers": [1]}, {"heads": [0], "layers": [0]}, {"heads": [[1, 0]]}]
        for one, member in zip(some, ("sliding_window", "forget_more", "state_norm"), strict=True):
            add(f"{member} {one} {kind}", [mitigation_spec(member) | one], {"kind": kind})
    for number, chain in enumerate(CHAINS):
        add(f"chain {number}", chain)
    return {name: (specs, mixer) for name, specs, mixer in found}


def pairs() -> list[tuple[str, list[Spec], Spec]]:
    """Both orders of two changes of the steps, of one cell; one order of every other pair."""
    found = []
    for mixer, cell in ((kind, MIXERS[kind]) for kind in KINDS_OF_CELLS):
        kinds = [kind for kind in MITIGATIONS if MITIGATIONS[kind].undefined(cell) is None][1:]
        for first, second in combinations_with_replacement(kinds, 2):
            if first == second == "sliding_window":
                continue
            if {first, second} <= STEPS and mixer != "mamba2":
                continue  # no cell sees more of them than the steps that they give
            specs = [mitigation_spec(first), mitigation_spec(second)]
            if {first, second} == {"sliding_window", "state_norm"}:
                if mixer != "mamba2":  # which has several heads
                    continue
                specs = [one | {"heads": HEADS_OF_PAIRS[one["kind"]]} for one in specs]
            orders = [specs, specs[::-1]] if {first, second} <= STEPS else [specs]
            for order in orders[: 1 + (first != second)]:
                name = "+".join(str(one["kind"]) for one in order)
                found.append((f"{name} {mixer}", order, mixer_spec(mixer)))
    return found


NORM: Spec = {"kind": "mamba2", "d_state": 3, "head_dim": 16, "norm_eps": 1e-2, "backend": "torch"}
PER_CHANNEL = [None, [0.5, 2.0, 1.0, 1.5] * 4]
FOUR_HEADS: Spec = {"kind": "kda", "n_heads": 4, "key_dim": 3, "value_dim": 2}
STEPS = {"scale_delta", "scale_decay", "power_decay", "token_filter"}
HEADS_OF_PAIRS = {"sliding_window": [0, 3], "state_norm": [1, 2]}
HEADS: list[Spec] = [
    {"layers": [1]},
    {"layers": []},
    {"heads": [0, 2]},
    {"heads": [3], "layers": [0]},
    {"heads": [[0, 1], [1, 3], [1, 2]]},
    {"heads": [[0, 1], [1, 3]], "layers": [1]},
    {"heads": []},
]
# One number, by layer, by layer and head; null leaves alone.
NUMBERS: list[tuple[str, Spec]] = [
    ("state_norm", {"threshold": [0.4, None]}),
    ("state_norm", {"threshold": float("inf")}),
    ("sliding_window", {"window": 150}),
    ("state_norm", {"threshold": [[0.4, None, 0.2, 3.0], 0.5]}),
    ("forget_more", {"decay_scale": [[0.9, None, 0.99, 1.0], None], "input_scale": 0.75}),
    ("forget_more", {"input_scale": [0.5, [None, 0.1, 1.0, 0.7]], "decay_scale": 1.0}),
    ("scale_delta", {"scale": [None, [0.5, 2.0, None, 1.0]]}),
    ("scale_decay", {"scale": [3.0, [0.5, 2.0, None, 1.0]]}),
    ("token_filter", {"threshold": [[0.05, None, 0.1, 0.0], None]}),
]
CHAINS: list[list[Spec]] = [
    [mitigation_spec(kind) for kind in MITIGATIONS if kind != "sliding_window"],
    [mitigation_spec(kind) for kind in reversed(list(MITIGATIONS)) if kind != "state_norm"],
    [
        mitigation_spec("token_filter"),
        mitigation_spec("forget_more") | {"heads": [1, 2]},
        mitigation_spec("scale_delta") | {"layers": [1]},
        mitigation_spec("forget_more"),
        mitigation_spec("power_decay") | {"heads": [[0, 1]]},
        mitigation_spec("state_norm") | {"heads": [0, 1]},
        mitigation_spec("sliding_window") | {"heads": [2]},
    ],
    [{"kind": "state_norm", "threshold": threshold} for threshold in (0.015, 0.4)],
]
CASES = cases()
PAIRS = {name for name, _, _ in pairs()}


def layers_of(name: str) -> int:
    """How many layers a case needs: two where they differ, by numbers or by a choice of heads."""
    return 2 if name.startswith(("chain", "numbers")) or "{" in name else 1


@pytest.mark.parametrize(
    "name", sampled({name: name for name in CASES}, 3, always=lambda name: name not in PAIRS)
)
def test_every_case_equals_its_definition(name: str) -> None:
    specs, mixer = CASES[name]
    how: dict[str, Any] = {"seed": len(name), "n_layers": layers_of(name)}
    assert_as_defined(specs, mixer, block=["residual", "plain"][len(specs) % 2], **how)


@pytest.mark.parametrize(
    "name", sampled({name: name for name, (specs, _) in CASES.items() if len(specs) == 1}, 8)
)
def test_float32_equals_the_definition_in_float64(name: str) -> None:
    assert_as_defined(*CASES[name], torch.float32, seed=len(name), n_layers=layers_of(name))


@pytest.mark.parametrize("mixer", KINDS_OF_CELLS)
def test_only_changes_of_the_steps_depend_on_their_order(mixer: str) -> None:
    """Members of different stages give the same bits in either order of the list."""
    tokens = random_tokens(1, 9)
    for name, specs, spec in pairs():
        if spec["kind"] == mixer and not {one["kind"] for one in specs} <= STEPS:
            one, other = (build_mitigated(list(way), spec) for way in (specs, reversed(specs)))
            assert torch.equal(one(tokens).logits, other(tokens).logits), name


def random_chain(seed: int) -> Case:
    """One to four mitigations with random numbers, layers and heads, of a random cell."""
    draw = random.Random(seed)
    mixer = draw.choice([MAMBA2, MAMBA2, WIDE, {"kind": "lstm"}, {"kind": "gru"}, {"kind": "rnn"}])
    cell, specs = MIXERS[mixer["kind"]], list[Spec]()
    kinds = [kind for kind in MITIGATIONS if MITIGATIONS[kind].undefined(cell) is None][1:]
    redefines = {"sliding_window": [0, 2], "state_norm": [1, 3]}
    for kind in draw.choices(kinds, k=draw.randint(1, 4)):
        known = {one["kind"] for one in specs}
        if kind in redefines and (kind in known or (known & redefines.keys() and not cell.scans)):
            continue
        spec: Spec = {"kind": kind}
        for name, value in mitigation_spec(kind).items():
            if name not in ("kind", "heads"):
                most = 1.0 if kind == "forget_more" else 9.0
                size = draw.choice([0.3, 0.8, 1.0, 1.2]) * value
                spec[name] = draw.randint(1, 12) if name == "window" else min(size, most)
        spec["layers"] = draw.choice([None, None, [0], [1]])
        heads = redefines.get(kind) or draw.choice([None, [0], [1, 2]])
        specs.append(spec | {"heads": heads if cell.scans else None})
    return specs, mixer


@pytest.mark.parametrize("seed", sampled({str(seed): seed for seed in range(400)}, 32))
def test_random_chains(seed: int) -> None:
    specs, mixer = random_chain(seed)
    assert_as_defined(specs, mixer, seed=seed, time=10 + seed % 30)


@SLOW
@pytest.mark.parametrize("name", CASES)
def test_longer_texts_equal_their_definition(name: str) -> None:
    """Other weights, and pieces of more than a chunk of the C++ kernels."""
    for seed in range(10, 13):
        assert_as_defined(*CASES[name], time=150, seed=seed)


@pytest.mark.parametrize("kind", ["mamba2", "mamba3", "lstm", "gru", "rnn"])
@pytest.mark.parametrize("reached", ["by all", "by some", "by none"])
def test_limits_that_all_some_and_no_states_reach(kind: str, reached: str) -> None:
    some = 0.02 if "mamba" in kind else 0.5
    limit = {"by all": 1e-4, "by some": some, "by none": 1e3}[reached]
    spec = {"kind": "state_norm", "threshold": limit}
    reference = assert_as_defined([spec], mixer_spec(kind), time=70, n_layers=1)
    (member,) = reference.chains[0].members
    assert isinstance(member, StateNorm)
    share = torch.stack(member.rescaled)[1:].double().mean()  # from a random state
    assert {"by all": share == 1, "by some": share > 0.02, "by none": share == 0}[reached]


@pytest.mark.parametrize("size", [1e-30, 1e19, 1e37])
@pytest.mark.parametrize("spec", [mixer_spec(k) for k in ("lstm", "gru", "rnn")] + MORE_MIXERS[:1])
def test_a_memory_of_any_size_is_limited(spec: Spec, size: float) -> None:
    """In float32 as in float64, though its square is 0 or infinite; with and without gradients."""
    model = build_mitigated([{"kind": "state_norm", "threshold": 0.5}], spec, dtype=torch.float32)
    exact, start = copy.deepcopy(model).double(), random_state(model, 2)
    layers = states.tree_map(lambda leaf: size * leaf, start.layers)
    wide = states.tree_map(torch.Tensor.double, layers)
    wanted = exact(random_tokens(2, 9), start._replace(layers=wide))
    for tracked in (True, False):
        with torch.set_grad_enabled(tracked):
            found = model(random_tokens(2, 9), start._replace(layers=layers))
        assert_near(found.logits, wanted.logits, 5e-5)
        pairs = zip(model.memories(found.state), exact.memories(wanted.state), strict=True)
        for ours, theirs in pairs:
            assert_near(ours, theirs, 5e-5)


def test_options_are_frozen_values() -> None:
    """A mitigation can be compared, hashed and described, and cannot be changed."""
    spec = {"kind": "state_norm", "threshold": [[1.0, None], 2], "heads": [[0, 1]], "layers": [0]}
    one, other = mitigation(spec), mitigation(spec)
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == "state_norm(threshold=[[1.0, None], 2.0], layers=[0], heads=[[0, 1]])"
    for text in (str(one), str(one).replace("None", "null")):
        assert mitigation(text) == one
    found = {"kind": "state_norm", "heads": "collapsing", "diagnosis": Path("a,b=1/None.yaml")}
    spec |= {"layers": [0], "threshold": [None, [0.5, math.inf]], **found}
    assert mitigation(str(mitigation(spec))) == mitigation(spec)
    assert one != mitigation(spec | {"layers": None})
    with pytest.raises(AttributeError):
        one.threshold = 3.0  # type: ignore[union-attr, misc]


def test_every_mitigation_has_a_definition_and_an_effect() -> None:
    assert DEFINITIONS.keys() == MITIGATIONS.keys()
    tokens = random_tokens(2, 40)
    for kind, definition in DEFINITIONS.items():
        assert (definition is Defined) == (kind == "none")
        ours = build_mitigated([mitigation_spec(kind)])
        same = torch.allclose(ours(tokens).logits, ours.under(None)(tokens).logits)
        assert same == (kind == "none"), kind
