"""docs/load.md says of every architecture what is measured on a tiny model of it."""

from __future__ import annotations

import pytest

from longrnn.hf.hybrid.families import FAMILIES
from tests.hf.architecture_table import DOCUMENT, KINDS, measure, rows

FAST = [
    "gemma3n_text",
    "gemma4_text",
    "llama",
    "mamba2",
    "qwen3_next",
    "rwkv",
    "openai-gpt",
    *sorted(FAMILIES),
]


def test_the_table_has_every_architecture_once() -> None:
    """And at least 45 of them load."""
    found = rows(DOCUMENT.read_text())
    assert sorted(found) == KINDS
    assert sum(support.loads == "yes" for support in found.values()) >= 45


@pytest.mark.parametrize(
    "kind",
    [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_an_entry_is_what_is_measured(kind: str) -> None:
    assert rows(DOCUMENT.read_text())[kind] == measure(kind)
