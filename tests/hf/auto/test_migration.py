"""What docs/load.md shows for users of other libraries computes the same there and here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Mamba2ForCausalLM

import longrnn
from longrnn.hf.auto import LongRNNForCausalLM
from tests.contracts.builders import assert_near
from tests.hf.foreign import causal, tokens


@torch.no_grad()
def test_from_transformers(tmp_path: Path) -> None:
    """The same weights, logits and continuation as `Mamba2ForCausalLM` with its cache."""
    causal("mamba2").save_pretrained(tmp_path)
    text, more = tokens(2, 9), tokens(2, 3, seed=1)
    theirs: Any = Mamba2ForCausalLM.from_pretrained(tmp_path)
    before = theirs(text, use_cache=True)
    model = LongRNNForCausalLM.of(longrnn.load(tmp_path))  # type: ignore[arg-type]
    output: Any = model(text)
    assert_near(output.logits, before.logits, 1e-5)
    continued = theirs(more, cache_params=before.cache_params)
    after: Any = model(more, past_key_values=output.past_key_values)
    assert_near(after.logits, continued.logits, 1e-5)


def test_importing_the_auto_classes_registers_them() -> None:
    """`import longrnn` imports neither torch nor transformers."""
    code = """
import sys
import longrnn
assert not {"torch", "transformers"} & set(sys.modules)
import longrnn.hf.load
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
import longrnn.hf.auto
from longrnn.hf.names import embedded
model = AutoModelForCausalLM.from_pretrained(embedded()["collapse-tiny"])
assert model.config.model_type == "longrnn"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
