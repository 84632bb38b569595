"""Numbers of tokens are written as lengths, `2k`, wherever a user gives one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from longrnn.cli.app import app
from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS
from longrnn.registry import Registry, keyword_options
from longrnn.training.config import TrainConfig
from longrnn.training.differences import FAMILIES
from longrnn.units import is_token_count
from tests.cli.conftest import commands
from tests.refusals import naming

TOKEN_COUNTS = [
    (TrainConfig, "length.max", {"length": {"max": 2048}}),
    (TrainConfig, "length.min", {"length": {"max": 4096, "min": 2048}}),
    (TrainConfig, "batch_tokens", {"batch_tokens": 2048}),
    (TrainConfig, "eval_length", {"eval_length": 2048}),
]


@pytest.mark.parametrize(("kind", "key", "values"), TOKEN_COUNTS)
def test_numbers_of_tokens_are_written_as_on_the_command_line(
    kind: Any, key: str, values: dict[str, Any]
) -> None:
    """`2k` in a file and in an override is 2048; what is not a length is refused with the key."""
    expected = build_config(kind, values)
    *above, last = key.split(".")
    written = {**values.get(above[0], {}), last: "2k"} if above else "2k"
    assert build_config(kind, {**values, (above or [last])[0]: written}) == expected
    assert build_config(kind, values, [f"{key}=2k"]) == expected
    for wrong in ("2x", "-2k", "0k"):
        with pytest.raises(UserError, match=naming(key, wrong)):
            build_config(kind, values, [f"{key}={wrong}"])


@pytest.mark.parametrize(
    ("registry", "kind"),
    [
        (family, kind)
        for family in [MITIGATIONS, *FAMILIES.values()]
        for kind in family
        if keyword_options(family[kind])
    ],
)
def test_options_that_count_tokens_are_lengths(registry: Registry[Any], kind: str) -> None:
    """An option with the name of a number of tokens takes `2k`, in every registry."""
    for name, hint in keyword_options(registry[kind], annotated=True).items():
        counts = re.search(r"(^|_)(window|chunk|stride|context|length|tokens)$", name)
        assert counts is None or is_token_count(hint), name
        if is_token_count(hint):
            assert registry.complete({"kind": kind, name: "2k"})[name] == 2048
            with pytest.raises(UserError, match=naming(name, "2x")):
                registry.complete({"kind": kind, name: "2x"})


def test_command_line_options_that_count_tokens_are_lengths() -> None:
    """No option that counts tokens is a plain integer, which would refuse `2k`."""
    found = commands(typer.main.get_command(app))
    for option in [option for _, command in found for option in command.params]:
        text = getattr(option, "help", None) or ""
        described = getattr(option, "type_descriptor", None)  # none for --help
        if described is not None and described.annotation is int:
            assert re.search(r"\btokens\b|\blength of\b", text, re.I) is None, option.opts
