"""Registries: members by name, options checked against the constructor's signature."""

from __future__ import annotations

import pytest

from longrnn.cells import GRU, MIXERS
from longrnn.errors import UserError
from longrnn.positions import POSITIONS
from longrnn.registry import Registry, keyword_options
from tests.refusals import naming


@pytest.mark.parametrize("registry", [MIXERS, POSITIONS], ids=lambda registry: registry.family)
def test_options_of_the_members(registry: Registry) -> None:
    """Every option of every member states a type and a default, and accepts that default."""
    for kind, member in registry.items():
        defaults = member.__init__.__kwdefaults__ or {}
        assert defaults.keys() == keyword_options(member).keys(), kind
        assert registry.complete({"kind": kind, **defaults}) == {"kind": kind, **defaults}


def test_a_name_stands_for_one_class() -> None:
    """Another class is refused; a module that runs again replaces its own."""
    with pytest.raises(UserError, match=naming("mamba2", "GRU")):
        MIXERS.register("mamba2")(GRU)
    again = type("GRU", (GRU,), {"__module__": GRU.__module__})
    assert MIXERS.register("gru")(again) is MIXERS["gru"] is again
    MIXERS.register("gru")(GRU)
