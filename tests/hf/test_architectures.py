"""Every Hugging Face architecture fulfils the contract of a language model or is refused."""

from __future__ import annotations

import pytest
import torch

from longrnn.errors import UserError
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.foreign_load import open_hugging_face
from tests.hf.architecture_table import DOCUMENT, KINDS, measure, rows
from tests.hf.architectures import FEW, MANY, architecture
from tests.hf.foreign import assert_continues, causal, tokens

TOLERANCE = 1e-5
# Of every kind of row: models of ours, hybrids, foreign models, and those that are refused.
MEASURED = ["mamba2", "falcon_h1", "xlstm", "qwen3_next", "llama", "gemma3n_text", "openai-gpt"]
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in MANY]


@pytest.mark.parametrize("kind", [*FEW, *SLOW])
def test_splits_and_forks_equal_one_call(kind: str) -> None:
    """Pieces, reused forks and rows of different lengths give the logits of one call without a
    cache, and no call changes a state."""
    theirs = architecture(kind)
    model, text = ForeignLM(theirs), tokens(2, 40, seed=3) % 60
    with torch.no_grad():
        whole = theirs(input_ids=text, use_cache=False).logits
    assert_continues(model, text, whole, TOLERANCE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_as_the_reason(value: float) -> None:
    """The message names NaN or infinite weights, not a cache that cannot be forked."""
    theirs = causal("llama")
    with torch.no_grad():
        theirs.model.norm.weight[3] = value
    with pytest.raises(UserError, match="model.norm.weight"):
        open_hugging_face(theirs)


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
