"""The README's Python example and the public names work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import longrnn

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_example_recalls_its_key() -> None:
    """The example, in a separate process, recalls the key after 100,000 tokens."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    position = int(first.split()[0])
    assert position > 100_000
    assert "40913" in first
    assert second.split()[0] == first.split()[0], "both questions must start from the same state"


@pytest.mark.parametrize("name", longrnn.__all__)
def test_every_public_name_resolves(name: str) -> None:
    """Every name in `longrnn.__all__` can be imported lazily."""
    assert getattr(longrnn, name) is not None
