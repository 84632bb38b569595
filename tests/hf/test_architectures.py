"""Every Hugging Face architecture fulfils the contract of a language model or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.state import leaves
from tests.contracts.builders import assert_near
from tests.hf.architecture_table import DOCUMENT, KINDS, measure, rows
from tests.hf.architectures import FEW, MANY, architecture
from tests.hf.foreign import causal, tokens

TOLERANCE = 1e-5
MEASURED = [
    "gemma3n_text",
    "gemma4_text",
    "llama",
    "mamba2",
    "qwen3_next",
    "openai-gpt",
    *FAMILIES,
]
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in MANY]


@pytest.mark.parametrize("kind", [*FEW, *SLOW])
def test_splits_and_forks_equal_one_call(kind: str) -> None:
    """Pieces, reused forks and rows of different lengths give the logits of one call without a
    cache, and no call changes a state."""
    theirs = architecture(kind)
    model, text = ForeignLM(theirs), tokens(2, 40, seed=3) % 60
    with torch.no_grad():
        whole = theirs(input_ids=text, use_cache=False).logits
    state, rows = None, []
    for piece in text.split([7, 1, 15, 17], dim=1):
        logits, state = model(piece, state)
        rows.append(logits)
    assert_near(torch.cat(rows, 1), whole, TOLERANCE)

    short, long = model(text[:1, :9], keep=0).state, model(text[1:, :30], keep=0).state
    both = states.join([short, long])
    before = {name: leaf.clone() for name, leaf in leaves(both)}
    follow = torch.stack([text[0, 9:19], text[1, 30:]])
    for _ in range(2):
        logits, _ = model(follow, both)
        assert_near(logits[0], whole[0, 9:19], TOLERANCE)
        assert_near(logits[1], whole[1, 30:], TOLERANCE)
    for name, leaf in leaves(both):
        assert torch.equal(leaf, before[name]), name


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_a_model_with_a_head_of_zeros_loads(kind: str) -> None:
    """Logits that are all zero are accepted, although they have no scale to compare with."""
    theirs = causal(kind, tie_word_embeddings=False)
    nn.init.zeros_(theirs.get_output_embeddings().weight)
    logits = ForeignLM(theirs)(tokens(2, 9)).logits
    assert not logits.any()


def test_a_window_is_crossed() -> None:
    """The state keeps as many keys as the window reads."""
    theirs, text = architecture("mistral", sliding_window=20), tokens(1, 40)
    model = ForeignLM(theirs)
    with torch.no_grad():
        whole = theirs(input_ids=text, use_cache=False).logits
    after = model(text[:, :25]).state
    assert after.layers[0].keys.entries.shape[-2] == 19
    assert_near(model(text[:, 25:], after).logits, whole[:, 25:], TOLERANCE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_as_the_reason(value: float) -> None:
    """The message names NaN or infinite weights, not a cache that cannot be forked."""
    theirs = causal("llama")
    with torch.no_grad():
        theirs.model.norm.weight[3] = value
    with pytest.raises(UserError, match="model.norm.weight"):
        ForeignLM(theirs)


def test_the_table_of_the_documents_has_every_architecture_once() -> None:
    """And at least 45 of them load."""
    found = rows(DOCUMENT.read_text())
    assert sorted(found) == KINDS
    assert sum(support.loads == "yes" for support in found.values()) >= 45


@pytest.mark.parametrize(
    "kind",
    [kind if kind in MEASURED else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_an_entry_of_the_table_is_what_is_measured(kind: str) -> None:
    assert rows(DOCUMENT.read_text())[kind] == measure(kind)
