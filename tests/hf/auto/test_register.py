"""Registration with transformers, which is imported after longrnn."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["PreTrainedModel", "pipeline"])
def test_any_name_of_transformers_can_be_imported_first(name: str) -> None:
    """In a new process, whatever is imported from transformers first after `import longrnn`."""
    program = (
        f"import longrnn\nfrom transformers import {name}\nfrom transformers import AutoConfig\n"
        "assert AutoConfig.for_model('longrnn').model_type == 'longrnn'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
