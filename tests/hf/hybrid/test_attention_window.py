"""`attention_window`: the attention layers of a hybrid read the last tokens only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load, mitigation
from longrnn.errors import UserError
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.model import HybridLM, open_hugging_face
from longrnn.state import join
from tests.contracts.builders import assert_near
from tests.hf.architectures import architecture
from tests.hf.foreign import causal, tokens, with_bytes

WINDOW = 5


def banded(theirs: Any, text: torch.Tensor) -> torch.Tensor:
    """The logits of transformers without a cache, with a mask of the window."""
    steps = torch.arange(text.shape[1])
    distance = steps[:, None] - steps
    seen = ((distance >= 0) & (distance < WINDOW))[None, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    masks = {"full_attention": mask, "linear_attention": None}
    with torch.no_grad():
        return theirs(input_ids=text, attention_mask=masks, use_cache=False).logits


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_pieces_equal_one_call_with_a_mask(kind: str) -> None:
    """Calls of any length and rows of different lengths read the window exactly."""
    theirs, text = architecture(kind), tokens(2, 30, seed=3) % 60
    model = open_hugging_face(theirs)
    assert isinstance(model, HybridLM)
    full = model(text).logits
    plain, model = model, model.with_attention_window(WINDOW)
    assert torch.equal(plain(text).logits, full)
    assert (plain.max_length, model.max_length) == (128, None)
    expected, state, rows = banded(theirs, text), None, []
    for piece in text.split([3, 1, 1, 15, 10], dim=1):
        logits, state = model(piece, state)
        rows.append(logits)
    assert_near(torch.cat(rows, 1), expected, 1e-5)
    assert not torch.allclose(expected, full, atol=1e-6)
    both = join([model(text[:1, :2]).state, model(text[1:, :20]).state])
    logits, _ = model(torch.stack([text[0, 2:12], text[1, 20:]]), both)
    assert_near(logits[0], expected[0, 2:12], 1e-5)
    assert_near(logits[1], expected[1, 20:], 1e-5)


def test_it_goes_with_a_mitigation_beyond_the_configured_length(tmp_path: Path) -> None:
    """The state stops growing, the length is not limited, and the fingerprint is another one."""
    folder = with_bytes(causal("falcon_h1", vocab_size=256), tmp_path / "hybrid")
    plain = load(folder)
    model = load(f"{folder}+attention_window(window=16)+state_norm(threshold=1)")
    assert isinstance(model, HybridLM)
    assert model.mitigation is not None
    assert (plain.max_length, model.max_length) == (128, None)
    assert model.under(None).fingerprint() != plain.fingerprint()
    state = model(tokens(1, 200)).state
    assert state.layers[0].attention.keys.entries.shape[-2] == 15


@pytest.mark.parametrize("window", [1, 129])
def test_a_window_out_of_range_is_refused(window: int) -> None:
    model = open_hugging_face(architecture("bamba"))
    assert isinstance(model, HybridLM)
    with pytest.raises(UserError, match="128"):
        model.with_attention_window(window)


def test_other_models_have_no_window(tmp_path: Path) -> None:
    folder = with_bytes(causal("llama", vocab_size=256), tmp_path / "llama")
    with pytest.raises(UserError):
        load(f"{folder}+attention_window(window=16)")
    with pytest.raises(UserError, match="attention_window"):
        hybrid = with_bytes(causal("falcon_h1", vocab_size=256), tmp_path / "hybrid")
        load(f"{hybrid}+attention_window")
    with pytest.raises(UserError):
        mitigation("attention_window(window=3)")
