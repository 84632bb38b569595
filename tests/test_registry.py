"""Registries: members by name, options checked against the constructor's signature."""

from __future__ import annotations

import pytest

from longrnn.cells import MIXERS
from longrnn.positions import POSITIONS
from longrnn.registry import Registry, keyword_options


@pytest.mark.parametrize("registry", [MIXERS, POSITIONS], ids=lambda registry: registry.family)
def test_options_of_the_members(registry: Registry) -> None:
    """Every option of every member states a type and a default, and accepts that default."""
    for kind, member in registry.items():
        defaults = member.__init__.__kwdefaults__ or {}
        assert defaults.keys() == keyword_options(member).keys(), kind
        assert registry.complete({"kind": kind, **defaults}) == {"kind": kind, **defaults}
