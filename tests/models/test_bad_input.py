"""Invalid tokens, states, seeds and options of generation are refused in one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longrnn import generate
from longrnn.errors import UserError
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.mitigations import mitigation
from longrnn.models import LanguageModel
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import architecture, causal

MODELS: dict[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: build_model(kind) for kind in ("rnn", "lstm", "gru", "mamba2")},
    "mitigated": lambda: build_model("mamba2").under(mitigation("forget_more")),
    "llama": lambda: ForeignLM(causal("llama")),
    "hybrid": lambda: open_hugging_face(architecture("bamba")),
}


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return MODELS[request.param]()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.uint64], ids=str)
def test_ids_of_every_integer_dtype_give_the_same(model: LanguageModel, dtype: torch.dtype) -> None:
    ids = random_tokens(2, 5)
    with torch.no_grad():
        assert torch.equal(model(ids.to(dtype)).logits, model(ids).logits)
    with pytest.raises(UserError, match="vocabulary"):
        model(torch.tensor([[model.vocab_size]]))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.ones(2, 3), "torch.float32"),
        (torch.ones(2, 3, dtype=torch.bool), "torch.bool"),
        (torch.ones(0, 3, dtype=torch.long), "batch"),
        (torch.tensor([3]), "shape"),
        ([[1, 2]], "list"),
        (torch.tensor([[-1]]), "vocabulary"),
        (torch.tensor([[2**64 - 1]], dtype=torch.uint64), "vocabulary"),
    ],
    ids=str,
)
def test_what_is_not_a_batch_of_ids_is_refused(
    model: LanguageModel, tokens: Any, message: str
) -> None:
    for call in (lambda: model(tokens), lambda: generate(model, tokens, max_new_tokens=1)):
        with pytest.raises(UserError, match=message):
            call()


def test_what_is_not_a_state_is_refused(model: LanguageModel) -> None:
    """Above all the whole result of the call before."""
    tokens = random_tokens(2, 3)
    result: Any = model(tokens)
    given: Any
    for given in (result, tuple(result.state), result.state.layers):
        with pytest.raises(UserError, match="LMState"):
            model(tokens, given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": [3]}, "token"),
        ({"stop": ["ab"]}, "token"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
    ],
    ids=str,
)
def test_settings_of_generation_out_of_range_are_refused(
    model: LanguageModel, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(model, random_tokens(1, 2), **{"max_new_tokens": 2, **settings})


@pytest.mark.parametrize("temperature", [1e-40, 5e-324, 1e-7])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_small_temperature_takes_the_likeliest(
    model: LanguageModel, temperature: float, top_p: float
) -> None:
    prompt = random_tokens(2, 3)
    sampled = generate(model, prompt, max_new_tokens=5, temperature=temperature, top_p=top_p)
    assert sampled.tokens == generate(model, prompt, max_new_tokens=5).tokens
