"""Registries: members by name, options checked against the constructor's signature."""

from typing import Any, get_args

import pytest

from longrnn.cells import GRU, MIXERS
from longrnn.data import TASKS
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS
from longrnn.options import Tokens
from longrnn.positions import POSITIONS
from longrnn.registry import Registry, keyword_options
from tests.refusals import naming


@pytest.mark.parametrize("registry", [MIXERS, POSITIONS], ids=lambda registry: registry.family)
def test_options_of_the_members(registry: Registry) -> None:
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


COUNTS = [
    pytest.param(family, kind, name, id=f"{family.family}-{kind}-{name}")
    for family in (MITIGATIONS, MIXERS, POSITIONS, TASKS)
    for kind in family
    for name, hint in keyword_options(family[kind]).items()
    if Tokens in (hint, *get_args(hint))
]


def read(family: Registry[Any], kind: str, name: str, value: object) -> object:
    """The number that the registry makes of an option's value."""
    needed = {"data": ["book.txt"]} if kind in ("text", "instruct") else {}
    return family.complete({"kind": kind, **needed, name: value})[name]


@pytest.mark.parametrize(("family", "kind", "name"), COUNTS)
def test_every_form_is_the_same_number(family: Registry[Any], kind: str, name: str) -> None:
    """Text, integers and whole floats, which YAML makes of `1e6`; what is not a number is named."""
    for value in ("4k", "4K", "4_096", "4096", 4096, 4096.0, "4.096e3"):
        assert read(family, kind, name, value) == 4096
    for value in ("4x", 4096.5, float("inf"), float("nan")):
        with pytest.raises(UserError, match=naming(name, value)):
            read(family, kind, name, value)
