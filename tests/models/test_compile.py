"""`torch.compile` and `torch.export` of a model give what the model gives."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from longrnn.cells import MIXERS
from longrnn.hf.auto import LongRNNForCausalLM
from longrnn.models import LMOutput
from tests.contracts.builders import (
    assert_near,
    assert_trees_near,
    build_model,
    differentiable,
    random_tokens,
)
from tests.contracts.subjects import assert_same, outcome_of

TOLERANCE = 1e-5
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about caches in what it traces
        yield
    torch._dynamo.reset()


@SLOW
@torch._dynamo.config.patch(allow_rnn=True)  # else a module of torch.nn interrupts the graph
@pytest.mark.parametrize("kind", MIXERS)
def test_a_traced_model_has_the_logits_states_and_gradients_of_the_model(kind: str) -> None:
    """In one graph, which no operation of longrnn interrupts; several tokens and one token."""
    model = build_model(kind, dtype=torch.float32)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens, start = random_tokens(2, 9), differentiable(model.init_state(2))
    for part in (tokens, tokens[:, :1]):
        found, expected = compiled(part, start), model(part, start)
        assert_same(
            outcome_of(model, found.logits, start, found.state),
            outcome_of(model, expected.logits, start, expected.state),
            torch.float32,
            TOLERANCE,
        )


@SLOW
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
def test_a_compiled_model_equals_the_model() -> None:
    """With the default compiler."""
    model = build_model("mamba2", dtype=torch.float32, d_model=64)
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        assert_equal_outputs(torch.compile(model)(tokens), model(tokens))


@pytest.mark.parametrize("strict", [pytest.param(True, marks=SLOW), False])
def test_an_exported_model_equals_the_model(strict: bool) -> None:
    model = build_model("mamba2", dtype=torch.float32, d_model=64)
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        exported = torch.export.export(model, (tokens,), strict=strict).module()
        assert_equal_outputs(exported(tokens), model(tokens))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_traced_hugging_face_model_equals_the_model(compiled: bool) -> None:
    model = LongRNNForCausalLM.of(build_model("mamba2", dtype=torch.float32))
    tokens = random_tokens(2, 9)
    traced: Callable[..., Any] | nn.Module = torch.compile(model, backend="aot_eager")
    if not compiled:
        traced = torch.export.export(model, (tokens,), strict=False).module()
    with torch.no_grad():
        assert_near(traced(tokens).logits, model(tokens).logits, TOLERANCE)


def assert_equal_outputs(found: LMOutput, expected: LMOutput) -> None:
    assert_near(found.logits, expected.logits, TOLERANCE)
    assert_trees_near(found.state, expected.state, TOLERANCE)
