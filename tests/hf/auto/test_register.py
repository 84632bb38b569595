"""Registration with transformers."""

from __future__ import annotations

import subprocess
import sys


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
