"""A call leaves no tensor for a garbage collection: those of training steps would pile up."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.models import LanguageModel
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import FEW, architecture
from tests.sampling import sampled

KINDS = sorted({*FEW, *FAMILIES})
TOKENS = random_tokens(2, 23)


def left_by(call: Callable[[], Any]) -> list[Tensor]:
    """The tensors that a call leaves in cycles of references."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [each for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def step(model: LanguageModel) -> None:
    """Two calls, with gradients if the model has them."""
    state = model(TOKENS[:, :10] % model.vocab_size).state
    logits = model(TOKENS[:, 10:] % model.vocab_size, state).logits
    if logits.requires_grad:
        logits.square().mean().backward()


def assert_leaves_nothing(model: LanguageModel) -> None:
    step(model)  # makes what is made once
    assert left_by(lambda: step(model)) == []


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_models_of_cells(mixer: str) -> None:
    assert_leaves_nothing(build_model(mixer))


@pytest.mark.parametrize("kind", sampled({kind: kind for kind in KINDS}, 3))
def test_hugging_face_models(kind: str) -> None:
    model: Any = open_hugging_face(architecture(kind))
    assert_leaves_nothing(model)
    try:
        windowed = model.with_attention_window(4, 2)
    except UserError:
        return  # test_attention_window has those that have none
    assert_leaves_nothing(windowed)
