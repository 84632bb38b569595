"""transformers' own common tests of causal language models, run on `LongRNNForCausalLM`.

An installed transformers has no tests. `LONGRNN_TRANSFORMERS_SOURCE` names the folder of the
unpacked source distribution of the installed version; `make test` downloads it. `SKIPPED` lists
what does not apply, and why. No test skips itself.
"""

import os
import sys
import unittest
from collections.abc import Callable
from fnmatch import filter as matching
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers.utils
import yaml
from transformers.models.auto import modeling_auto

from longrnn.cells import MIXERS
from longrnn.hf.auto import LongRNNConfig, LongRNNForCausalLM
from longrnn.models.blocks import Block
from tests.contracts.builders import mixer_spec
from tests.texts import DATA

SOURCE = Path(os.environ.get("LONGRNN_TRANSFORMERS_SOURCE", "nowhere"))
CODE = SOURCE / "src/transformers/__init__.py"
if not CODE.is_file() or f'__version__ = "{version("transformers")}"' not in CODE.read_text():
    command = f"pip download --no-deps --no-binary :all: transformers=={version('transformers')}"
    pytest.skip(
        f"LONGRNN_TRANSFORMERS_SOURCE does not name the unpacked source that `{command}` downloads",
        allow_module_level=True,
    )
pytest.importorskip("parameterized")  # which those tests import

# Values that differ from the defaults of every configuration, for the tester of configurations.
CONFIG_OPTIONS = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "architectures": ["LongRNNForCausalLM"],
    "id2label": {0: "negative", 1: "positive"},
    "label2id": {"negative": 0, "positive": 1},
    "problem_type": "regression",
    "chunk_size_feed_forward": 3,
}
# In place of modules that the common tests import and that the distribution lacks.
STAND_INS: dict[str, dict[str, Any]] = {
    "": {"__path__": [str(SOURCE / "tests")]},
    ".exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    ".generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    ".utils.test_configuration_utils": {"config_common_kwargs": CONFIG_OPTIONS},
}
PACKAGE = "transformers_common_tests"
for name, content in STAND_INS.items():
    module = sys.modules[PACKAGE + name] = ModuleType(PACKAGE + name)
    vars(module).update(content)
# The tester of configurations imports transformers in a way that needs the tests' __init__.py.
direct = mock.Mock(return_value=transformers)
with mock.patch.object(transformers.utils, "direct_transformers_import", direct):
    CONFIG: Any = import_module(f"{PACKAGE}.test_configuration_common")
TRAINING: Any = import_module(f"{PACKAGE}.test_training_mixin").TrainingTesterMixin
COMMON: Any = import_module(f"{PACKAGE}.test_modeling_common")

# Tests that do not apply, by the reason.
SKIPPED = yaml.safe_load((DATA / "transformers_skipped.yaml").read_text())
# Tests of parameters that are never cast to a narrower dtype, for cells that have some.
OF_WIDE_WEIGHTS = ("test_keep_in_fp32_modules", "test_keep_in_fp32_modules_exist")
# Tests that transformers runs on models without a head only.
OF_BASE_MODELS = (
    "test_inputs_embeds_matches_input_ids",
    "test_model_forward_default_config_values",
)
# A cell that reads one token at a time, one with weights that stay wide, and one with everything.
MODELS: dict[str, dict[str, Any]] = {
    "TestGru": {"mixer": mixer_spec("gru")},
    "TestMamba2": {"mixer": mixer_spec("mamba2")},
    "TestMitigated": {
        "mixer": mixer_spec("mamba2"),
        "position": {"kind": "learned", "max_length": 512},
        "mitigation": "state_norm(threshold=0.015)",
    },
}


class Tester:
    """The small model of a test class, with `options` of `LongRNNConfig`, and inputs for it."""

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
        self.model_tester = Tester(self.options)
        if self._testMethodName in OF_BASE_MODELS:
            known = {"longrnn": LongRNNForCausalLM.__name__}
            self.enterContext(mock.patch.dict(modeling_auto.MODEL_MAPPING_NAMES, known))
        # The blocks that can be recomputed.
        self.enterContext(mock.patch.object(COMMON, "GradientCheckpointingLayer", Block))

    def skipTest(self: Any, reason: str) -> None:  # noqa: N802
        name = self._testMethodName
        is_examined = any(name in vars(part) for part in (COMMON.ModelTesterMixin, TRAINING))
        assert not is_examined, f"{reason}: list the test in SKIPPED"
        raise unittest.SkipTest(reason)

    def test_config(self: Any) -> None:
        sizes = ["hidden_size", "num_hidden_layers"]
        CONFIG.ConfigTester(
            self, config_class=LongRNNConfig, common_properties=sizes, **self.options
        ).run_common_tests()

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self: Any) -> Any:
        # Hidden states of padded rows are copies in the order of the inputs.
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return config, {"input_ids": inputs["input_ids"]}


def _skip(reason: str) -> Callable[..., None]:
    @unittest.skip(reason)
    def skipped(self: Any) -> None: ...

    return skipped


def _test_class(name: str, options: dict[str, Any]) -> type:
    """The common tests of one model; every pattern of `SKIPPED` has to match one of them."""
    body: dict[str, Any] = {}
    for reason, patterns in SKIPPED.items():
        for pattern in patterns:
            found = matching(dir(COMMON.ModelTesterMixin), pattern)
            assert found, f"no test matches {pattern}"
            body |= dict.fromkeys(found, _skip(reason))
    if not MIXERS[options["mixer"]["kind"]].wide_weights:
        body |= dict.fromkeys(OF_WIDE_WEIGHTS, _skip("its cell has no such weights"))
    body["test_training_overfit"] = pytest.mark.slow(TRAINING.test_training_overfit)
    mixins = (COMMON.ModelTesterMixin, COMMON.GenerationTesterMixin, TRAINING)
    bases = (LongRNNTest, *mixins, unittest.TestCase)
    made = type(name, bases, {**body, "options": options, "__module__": __name__})
    return made if name == "TestMamba2" else pytest.mark.slow(made)


globals().update({name: _test_class(name, options) for name, options in MODELS.items()})
