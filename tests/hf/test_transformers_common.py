"""transformers' own common tests of causal language models, run on `LongRNNForCausalLM`.

They are not installed with transformers: see `transformers_source`. `SKIPPED` lists what does not
apply, and why. No test skips itself.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from fnmatch import filter as matching
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from transformers.models.auto import modeling_auto

from longrnn.cells import MIXERS
from longrnn.hf.auto import LongRNNConfig, LongRNNForCausalLM
from longrnn.models.blocks import Block
from tests.contracts.builders import mixer_spec
from tests.hf import transformers_source
from tests.texts import DATA

COMMON: Any = None  # `CommonTests`
REASON = ""
try:
    COMMON = transformers_source.load()
except transformers_source.Unavailable as error:
    REASON = str(error)

# Tests that do not apply, by the reason.
SKIPPED = yaml.safe_load((DATA / "transformers_skipped.yaml").read_text())
# Tests of parameters that are never cast to a narrower dtype, for cells that have some.
OF_WIDE_WEIGHTS = ("test_keep_in_fp32_modules", "test_keep_in_fp32_modules_exist")
# Tests that transformers runs on models without a head only.
OF_BASE_MODELS = {
    "test_inputs_embeds_matches_input_ids",
    "test_model_forward_default_config_values",
}
# Tests that look for the blocks that can be recomputed.
OF_BLOCKS = {"test_gradient_checkpointing_enable_disable"}

# A cell that reads one token at a time, one with weights that stay wide, and one with everything.
MODELS: dict[str, dict[str, Any]] = {
    "Gru": {"mixer": mixer_spec("gru")},
    "Mamba2": {"mixer": mixer_spec("mamba2")},
    "Mitigated": {
        "mixer": mixer_spec("mamba2"),
        "position": {"kind": "learned", "max_length": 512},
        "mitigation": "state_norm(threshold=0.015)",
    },
}


class Tester:
    """The small model of a test class, and inputs for it.

    Args:
        options: of `LongRNNConfig`.
    """

    __test__ = False  # it has the names that transformers gives to a model tester
    batch_size, seq_length = 5, 7
    vocab_size, hidden_size, num_hidden_layers = 99, 32, 2
    is_training = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def get_config(self) -> LongRNNConfig:
        """Its configuration; the ids of special tokens are not among those of the inputs."""
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        sizes = {"vocab_size": self.vocab_size, "hidden_size": self.hidden_size}
        sizes["num_hidden_layers"] = self.num_hidden_layers
        return LongRNNConfig(**sizes, **special, **self._options)

    def prepare_config_and_inputs_for_common(self) -> tuple[LongRNNConfig, dict[str, Any]]:
        """Rows of three to seven tokens, with padding on the left, where `generate` takes it."""
        tokens = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        mask = torch.ones_like(tokens).triu()
        return self.get_config(), {"input_ids": tokens, "attention_mask": mask}


class LongRNNTest:
    """What a test class adds to the mixins of transformers."""

    all_model_classes = (LongRNNForCausalLM,)
    has_attentions = False
    options: dict[str, Any]

    def setUp(self: Any) -> None:
        self.tester = Tester(self.options)
        name = self._testMethodName
        known = {"longrnn": LongRNNForCausalLM.__name__}
        names = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
        if name in OF_BASE_MODELS:
            names.append(modeling_auto.MODEL_MAPPING_NAMES)
        for mapping in names:
            self.enterContext(mock.patch.dict(mapping, known))
        if name in OF_BLOCKS:
            self.enterContext(
                mock.patch.object(COMMON.modeling, "GradientCheckpointingLayer", Block)
            )

    @property
    def model_tester(self: Any) -> Tester:
        return self.tester

    def skipTest(self: Any, reason: str) -> None:  # noqa: N802
        assert not _is_examined(self._testMethodName), f"{reason}: list the test in SKIPPED"
        raise unittest.SkipTest(reason)

    def test_config(self: Any) -> None:
        COMMON.config(
            self,
            config_class=LongRNNConfig,
            common_properties=["hidden_size", "num_hidden_layers"],
            **self.options,
        ).run_common_tests()

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self: Any) -> Any:
        # Hidden states of padded rows are copies in the order of the inputs.
        config, inputs = self.tester.prepare_config_and_inputs_for_common()
        return config, {"input_ids": inputs["input_ids"]}


def _is_examined(name: str) -> bool:
    """Whether a test is one of those for which the tables were written."""
    return any(name in vars(part) for part in (COMMON.modeling.ModelTesterMixin, COMMON.training))


def _skipped() -> dict[str, str]:
    """The reason for each test that `SKIPPED` matches."""
    names = dir(COMMON.modeling.ModelTesterMixin)
    return {
        name: reason
        for reason, patterns in SKIPPED.items()
        for pattern in patterns
        for name in matching(names, pattern)
    }


def _skip(reason: str) -> Callable[..., None]:
    @unittest.skip(reason)
    def skipped(self: Any) -> None: ...

    return skipped


def _test_class(name: str, options: dict[str, Any]) -> type:
    """The common tests of one model."""
    mixins = (COMMON.modeling.ModelTesterMixin, COMMON.modeling.GenerationTesterMixin)
    bases = (LongRNNTest, *mixins, COMMON.training, unittest.TestCase)
    body = {test: _skip(reason) for test, reason in _skipped().items()}
    if not MIXERS[options["mixer"]["kind"]].wide_weights:
        body |= dict.fromkeys(OF_WIDE_WEIGHTS, _skip("its cell has no such weights"))
    found = type(name, bases, {**body, "options": options, "__module__": __name__})
    return found if name == "TestMamba2" else pytest.mark.slow(found)


if COMMON is not None:
    for kind, given in MODELS.items():
        globals()[f"Test{kind}"] = _test_class(f"Test{kind}", given)


@pytest.mark.skipif(COMMON is None, reason=REASON)
def test_every_skipped_test_exists() -> None:
    names = dir(COMMON.modeling.ModelTesterMixin)
    for pattern in [pattern for patterns in SKIPPED.values() for pattern in patterns]:
        assert matching(names, pattern), f"no test matches {pattern}"
    for name in {*OF_WIDE_WEIGHTS, *OF_BASE_MODELS} | OF_BLOCKS:
        assert name in names
        assert name not in _skipped()
