"""Hugging Face models as language models: in one call, in pieces, from forks, in ragged batches."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn import state as states
from longrnn.errors import UserError
from longrnn.hf.foreign import ForeignLM
from tests.contracts.builders import assert_near
from tests.hf.foreign import VOCAB, causal, in_one_call, tokens
from tests.refusals import naming

TOLERANCE = 1e-5
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
KEYS = ("full_attention", "sliding_attention")
# All kinds of cache layers: growing keys, sliding windows, recurrent states, and mixtures.
KINDS = ["llama", "gpt_neox", "mistral", "qwen2", "gemma2", "gpt2", "falcon_h1"]


@cache
def wrapped(kind: str) -> ForeignLM:
    return ForeignLM(causal(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues_where_it_was(kind: str, tmp_path: Path) -> None:
    """A state that is detached, cloned, reset in one row, saved and loaded continues exactly."""
    model, text = wrapped(kind), tokens(2, 30)
    state = states.clone(states.detach(model(text[:, :12], keep=0).state))
    state = states.reset(state, model.init_state(2), torch.tensor([False, True]))
    assert state.position.tolist() == [12, 0]
    states.save(state, tmp_path / "state", model=model)
    again = states.load(tmp_path / "state", model)
    assert states.nbytes(again) == states.nbytes(state)
    follow = torch.stack([text[0, 12:], text[1, :18]])
    logits, after = model(follow, again)
    assert after.position.tolist() == [30, 18]
    assert_near(logits[0], in_one_call(model.model, text[:1])[0, 12:], TOLERANCE)
    assert_near(logits[1], in_one_call(model.model, text[1:, :18])[0], TOLERANCE)


@pytest.mark.parametrize("kind", ["mixtral", "granitemoehybrid"])
def test_experts_compute_in_float64(kind: str, tmp_path: Path) -> None:
    """Whether they are loaded so or cast later."""
    theirs, text = causal(kind), tokens(2, 12)
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    narrow = model(text).logits
    for each in (load(f"{tmp_path}+float64"), model.double()):
        logits, _ = each(text)
        assert logits.dtype == torch.float64
        assert_near(logits, narrow.double(), TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_keep_limits_the_logits_and_an_empty_text_changes_nothing(kind: str) -> None:
    """`keep` returns the last logits only; a text without tokens returns the same state."""
    model, text = wrapped(kind), tokens(2, 9)
    whole = model(text)
    for keep in (0, 1, 4, 20):
        logits, state = model(text, keep=keep)
        assert logits.shape == (2, min(keep, 9), VOCAB)
        assert_near(logits, whole.logits[:, 9 - min(keep, 9) :], TOLERANCE)
        assert state.position.tolist() == [9, 9]
    empty = model(text[:, :0], whole.state)
    assert empty.logits.shape == (2, 0, VOCAB)
    assert empty.state is whole.state
    assert model(text[:, :0]).state.position.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_maximum_length_is_enforced_unless_lifted(kind: str, tmp_path: Path) -> None:
    """`beyond` lifts the maximum length of models that compute their positions, and of no other."""
    causal(kind).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert isinstance(model, ForeignLM)
    assert model.max_length == 128
    state = model(tokens(1, 128), keep=0).state
    with pytest.raises(UserError, match=naming(128, 129)):
        model(tokens(1, 1), state)
    if kind == "gpt2":
        with pytest.raises(UserError, match=naming(128, "transformer.wpe")):
            load(f"{tmp_path}+beyond")
    else:
        far = load(f"{tmp_path}+beyond")
        with pytest.raises(UserError, match="write beyond"):
            load(f"{tmp_path}+beyond(window=4)")
        text = tokens(1, 200)
        whole = in_one_call(model.model, text)
        assert_near(far(text[:, 150:], far(text[:, :150]).state).logits, whole[:, 150:], TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("bert", {"is_decoder": False}, "cache"),
        ("llama", {"rope_parameters": DYNAMIC}, "dynamic"),
        ("gemma3_text", {"rope_parameters": dict.fromkeys(KEYS, DYNAMIC)}, "dynamic"),
    ],
)
def test_what_cannot_be_forked_is_refused(kind: str, options: dict[str, Any], reason: str) -> None:
    """Models without a cache, or whose cached keys would change, raise a UserError."""
    with pytest.raises(UserError, match=reason) as error:
        ForeignLM(causal(kind, **options))
    assert kind in str(error.value)
