"""What a user of transformers expects of every causal language model.

transformers' own tests of it run in `tests/hf/test_transformers_common.py`, where they are at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longrnn.hf import auto
from longrnn.hf.auto import LongRNNConfig, LongRNNForCausalLM
from longrnn.models import RecurrentLM
from longrnn.state import leaves
from tests.contracts.builders import random_tokens
from tests.hf.auto.models import build_auto
from tests.hf.auto.test_model import EVERY_PART

MASK = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0]])


def small(mixer: str = "gru", **options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "n_layers": 2}
    sizes |= {"mixer": {"kind": mixer}}
    return LongRNNConfig(**sizes, **options)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_a_checkpoint_lacks_are_reported_and_initialised(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the embedding; the new model that they are copied from is built once."""
    LongRNNForCausalLM(small("lstm", tie_embeddings=tied)).save_pretrained(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    built: list[RecurrentLM] = []

    def build(config: Any) -> RecurrentLM:
        built.append(RecurrentLM(config))
        return built[-1]

    monkeypatch.setattr(auto, "RecurrentLM", build)
    model, report = LongRNNForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(built) == 2  # the model itself, and the new one
    assert report["missing_keys"] >= {name for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        assert torch.equal(weight, built[1].get_parameter(name.removeprefix("model."))), name
    assert (model.model.head.weight is model.model.embedding.weight) == tied


@EVERY_PART
def test_embeddings_may_be_given_instead_of_tokens(mixer: str, position: str) -> None:
    """Logits, loss, state and the gradient of the embedding are those of the tokens."""
    model, tokens = build_auto(mixer, position=position), random_tokens(2, 7)
    found = []
    for given in ("input_ids", "inputs_embeds"):
        model.zero_grad()
        vectors = model.get_input_embeddings()(tokens)
        inputs = {given: tokens if given == "input_ids" else vectors, "attention_mask": MASK}
        output = model(**inputs, labels=tokens)
        output.loss.backward()
        state = [leaf for _, leaf in leaves(output.past_key_values.state)]
        grad = model.get_input_embeddings().weight.grad
        found.append([output.logits, output.loss, grad, *state])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
