"""Every Hugging Face architecture fulfils the contract of a language model or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.hf.adapter import HFLanguageModel
from longrnn.state import leaves
from tests.contracts.builders import assert_near
from tests.hf.architectures import FEW, MANY, architecture
from tests.hf.foreign import causal, tokens
from tests.refusals import naming

TOLERANCE = 1e-5
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in MANY]


@pytest.mark.parametrize("kind", [*FEW, *SLOW])
def test_splits_and_forks_equal_one_call(kind: str) -> None:
    """Pieces, reused forks and rows of different lengths give the logits of one call without a
    cache, and no call changes a state."""
    theirs = architecture(kind)
    model, text = HFLanguageModel(theirs), tokens(2, 40, seed=3) % 60
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


@pytest.mark.parametrize("kind", ["bamba", "recurrent_gemma"])
def test_generation_of_single_tokens_equals_one_call(kind: str) -> None:
    """Single tokens from the very first one give the logits of one call."""
    theirs = architecture(kind)
    model, text = HFLanguageModel(theirs), tokens(2, 12, seed=5)
    with torch.no_grad():
        whole = theirs(input_ids=text, use_cache=False).logits
    state, rows = None, []
    for token in text.split(1, dim=1):
        logits, state = model(token, state)
        rows.append(logits)
    assert_near(torch.cat(rows, 1), whole, TOLERANCE)


def test_only_models_that_miscount_are_given_positions() -> None:
    """Bamba starts at position 0 in every call and is given positions; Llama is not."""
    found = {
        kind: HFLanguageModel(architecture(kind)).gives_positions for kind in ("bamba", "llama")
    }
    assert found == {"bamba": True, "llama": False}


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_a_model_with_a_head_of_zeros_loads(kind: str) -> None:
    """Logits that are all zero are accepted, although they have no scale to compare with."""
    theirs = causal(kind, tie_word_embeddings=False)
    nn.init.zeros_(theirs.get_output_embeddings().weight)
    logits = HFLanguageModel(theirs)(tokens(2, 9)).logits
    assert not logits.any()


@pytest.mark.parametrize("kind", ["deepseek_v4", "openai-gpt", "moshi"])
def test_a_model_that_cannot_be_forked_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match=naming(kind)):
        HFLanguageModel(architecture(kind))


def test_a_window_that_few_tokens_do_not_cross_is_checked() -> None:
    """MiniMax ignores its window after a first layer without attention; Mistral does not."""
    types = ["linear_attention", "full_attention"]
    with pytest.raises(UserError, match="in pieces its logits differ"):
        HFLanguageModel(architecture("minimax", sliding_window=20, layer_types=types))
    theirs, text = architecture("mistral", sliding_window=20), tokens(1, 40)
    model = HFLanguageModel(theirs)
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
        HFLanguageModel(theirs)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_weights_that_few_tokens_read_are_checked(value: float) -> None:
    """A damaged row of the embedding is found, which no short text reads."""
    theirs = causal("llama", vocab_size=256, tie_word_embeddings=False)
    with torch.no_grad():
        theirs.model.embed_tokens.weight[200, 3] = value
    with pytest.raises(UserError, match="model.embed_tokens.weight"):
        HFLanguageModel(theirs)


class Quantised(Tensor):
    """A weight whose type knows the operations of a layer only, as those of quantised ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.aminmax:
            raise NotImplementedError("aminmax of a quantised weight")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_of_other_types_are_not_checked() -> None:
    theirs = causal("llama")
    head = theirs.lm_head.weight.detach().clone().as_subclass(Quantised)
    theirs.lm_head.weight = nn.Parameter(head, requires_grad=False)
    assert HFLanguageModel(theirs)(tokens(1, 4)).logits.isfinite().all()


def test_finite_weights_whose_values_overflow_are_refused() -> None:
    """Finite weights may still give logits that are not."""
    theirs = causal("llama").half()
    with torch.no_grad():
        theirs.lm_head.weight.fill_(6e4)
        theirs.model.norm.weight.fill_(6e4)
    with pytest.raises(UserError, match="dtype"):
        HFLanguageModel(theirs)
