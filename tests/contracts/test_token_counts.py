"""An option that is a number of tokens takes every way of writing one."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from longrnn.cells import MIXERS
from longrnn.data import TASKS
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS
from longrnn.options import Tokens
from longrnn.positions import POSITIONS
from longrnn.registry import Registry, keyword_options
from tests.refusals import naming

pytestmark = pytest.mark.core

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
