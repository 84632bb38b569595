"""A mitigation is part of the model value: `under` gives another model that shares the weights."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from longrnn import mitigation
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS
from longrnn.models import LanguageModel, LMOutput, RecurrentLM
from tests.contracts.builders import (
    GPU,
    Scripted,
    assert_trees_equal,
    build_model,
    mitigation_spec,
    random_tokens,
)
from tests.contracts.subjects import Subject, every_kind, started

pytestmark = pytest.mark.core

TOKENS = random_tokens(2, 23)
WINDOW = mitigation("sliding_window(window=4)")


def run(model: LanguageModel) -> LMOutput:
    """Two calls, the second from the state of the first."""
    return model(TOKENS[:, 10:], model(TOKENS[:, :10]).state)


def trained(model: RecurrentLM) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(TOKENS).logits.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assigned(model: RecurrentLM) -> None:
    model.load_state_dict(build_model(model.config.mixer, seed=7).state_dict(), assign=True)


def converted(model: RecurrentLM) -> None:
    model.to(torch.float32).to(torch.bfloat16).to(torch.float64)


def replaced(model: RecurrentLM) -> None:
    model.head = nn.Linear(8, 11, bias=False).double()  # type: ignore[assignment]
    model.blocks[0].norm = nn.RMSNorm(8, eps=0.5).double()  # type: ignore[assignment]


@pytest.mark.parametrize("change", [trained, assigned, converted, replaced])
@pytest.mark.parametrize("changed", ["given", "mitigated"])
@pytest.mark.parametrize("kind", ["mamba2", "lstm"])
def test_a_change_of_one_model_is_seen_by_the_other(
    kind: str, changed: str, change: Callable[[RecurrentLM], None]
) -> None:
    """Outputs and fingerprints are those of a model that is built anew from the weights."""
    plain = build_model(kind)
    ours = plain.under(WINDOW)
    before, known = run(ours), ours.fingerprint()
    torch.manual_seed(0)
    change(plain if changed == "given" else ours)
    assert not torch.equal(run(ours).logits, before.logits)
    assert ours.fingerprint() != known
    rebuilt = copy.deepcopy(plain)
    assert_trees_equal(run(plain), run(rebuilt))
    assert_trees_equal(run(ours), run(rebuilt.under(WINDOW)))
    assert ours.fingerprint() == rebuilt.under(WINDOW).fingerprint()


@every_kind
def test_the_given_model_does_not_change(subject: Subject) -> None:
    """And `under(None)` of a mitigated model is the plain one."""
    plain = subject._replace(specs=[]).build()
    expected, known = run(plain), plain.fingerprint()
    ours = plain.under([mitigation(spec) for spec in subject.specs])
    assert type(ours) is type(plain)
    assert (ours.fingerprint() == known) == (not subject.specs)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    assert plain.mitigation is None
    for model in (plain, ours.under(None), ours.under(None).under([])):
        assert_trees_equal(run(model), expected)
        assert model.fingerprint() == known
        assert not any(model.edits)
    assert_trees_equal(run(plain.under(mitigation("none"))), expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("scale_delta", "token_filter"),
        ("token_filter", "scale_delta"),
        ("forget_more", "sliding_window"),
        ("state_norm", "power_decay"),
    ],
)
def test_mitigations_add_up(one: str, other: str) -> None:
    model = build_model()
    a, b = (mitigation(mitigation_spec(kind)) for kind in (one, other))
    twice, once = model.under(a).under(b), model.under([a, b])
    assert_trees_equal(run(twice), run(once))
    assert twice.fingerprint() == once.fingerprint() != model.under(a).fingerprint()
    assert str(twice.mitigation) == str(once.mitigation) == f"{a}+{b}"
    assert model.under(f"{a}+{b}").fingerprint() == once.fingerprint()
    heads = [[one.tolist() for one in layers] for layers in once.mitigated_heads]
    assert heads == [[one.tolist() for one in layers] for layers in twice.mitigated_heads]
    assert len(heads) == len(once.mitigation.parts) == 2  # type: ignore[union-attr]


@every_kind
def test_copies_compute_the_same(subject: Subject) -> None:
    """With states of the original, after it has decoded; only shallow ones share its weights."""
    model = subject.build(torch.float32)
    state = started(model, 2)
    with torch.no_grad():
        model(TOKENS[:, :1], state)
        expected = model(TOKENS, state)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
            assert_trees_equal(other(TOKENS, state), expected)
            assert other.fingerprint() == model.fingerprint()
            shared = other.embedding.weight is model.embedding.weight
            other.embedding.weight.add_(0 if shared else 1)
            assert_trees_equal(model(TOKENS, state), expected)
        assert shared, "the shallow copy"


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", [kind for kind in MITIGATIONS if kind != "state_norm"]
)  # its number of scans depends on values
def test_a_mitigated_model_moves_to_another_device(kind: str) -> None:
    """No value is read back from the device, and nothing stays behind."""
    for options in ({}, {"heads": [1, 2]}, {"layers": [1]}):
        if kind == "none" and options:
            continue
        model = build_model().under(mitigation({**mitigation_spec(kind), **options})).to(GPU)
        state = model.init_state(2)
        for time in (1, 3, 40):
            logits, state = model(torch.zeros(2, time, dtype=torch.long, device=GPU), state)
            assert logits.device == GPU
        assert {one.device for one in model.memories(state)} == {GPU}


def test_a_model_without_cells_cannot_be_mitigated() -> None:
    model, tokens = Scripted(3, lambda read: torch.zeros(1)), torch.tensor([[0, 1, 2]])
    with pytest.raises(UserError, match="recurrence"):
        model.under(WINDOW)
    assert model.under(None).fingerprint() == model.fingerprint() == "scripted"
    losses, state = model.token_losses(tokens, torch.tensor([[1, 2, -100]]))
    torch.testing.assert_close(losses, torch.tensor([[1.0986, 1.0986, 0]]), atol=1e-4, rtol=0)
    assert (state.position.tolist(), model.memories(state)) == ([3], [])
