"""A run is compared by what its configuration means, not by how it is written."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from longrnn.config import build_config, flat
from longrnn.errors import UserError
from longrnn.registry import keyword_options
from longrnn.training.config import TrainConfig
from longrnn.training.differences import FAMILIES, differences, with_defaults
from longrnn.training.trainer import Trainer
from tests.training.runs import tiny, train

# Option values without which a member cannot be described.
REQUIRED: dict[str, dict[str, Any]] = {"text": {"files": ["a.txt"]}}
LLAMA = {"model_type": "llama", "hidden_size": 64}


def found(written: dict[str, Any], other: dict[str, Any]) -> str:
    """What differs between the records of two configurations."""
    first, second = (build_config(TrainConfig, values) for values in (written, other))
    return differences(asdict(first), second, set())


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"task": {"kind": "text", "data": "x", "packing": True}}, {"task": {"data": "x"}}),
        ({"task": {"kind": "text", "files": ["x"], "packing": False}}, {"task": {"files": ["x"]}}),
        ({"mitigation": "forget_more(decay_scale=0.9999)"}, {"mitigation": "forget_more"}),
        ({"mitigation": "forget_more"}, {"mitigation": {"kind": "forget_more"}}),
        ({"mitigation": "none"}, {}),
        ({"transformer": {**LLAMA, "hidden_act": "silu"}}, {"transformer": LLAMA}),
        ({"length": {"max": "4k"}}, {"length": {"max": 4096}}),
        ({"length": {"max": 1e3}}, {"length": {"max": "1_000"}}),
        ({"model": {"mixer": {"kind": "mamba2", "A_init": [1, 16]}}}, {}),
        ({"model": {}}, {}),
    ],
)
def test_what_means_the_same_is_no_difference(
    given: dict[str, Any], left_out: dict[str, Any]
) -> None:
    """An option with its default value equals one that is left out, in both directions."""
    if "task" in left_out:
        left_out = {"task": {"kind": "text", **left_out["task"]}}
    assert found(given, left_out) == found(left_out, given) == ""


@pytest.mark.parametrize(
    ("written", "other", "key"),
    [
        ({"packing": True, "files": ["x"]}, {"files": ["x"]}, "task.packing"),
        ({"packing": False, "data": "x"}, {"data": "x"}, "task.packing"),
    ],
)
def test_what_means_something_else_is_named(
    written: dict[str, Any], other: dict[str, Any], key: str
) -> None:
    """A default that depends on other options is that of these options."""
    pair = [{"task": {"kind": "text", **options}} for options in (written, other)]
    assert found(*pair).startswith(f"{key}: ")
    assert found({"mitigation": "forget_more(decay_scale=0.99)"}, {"mitigation": "forget_more"})
    assert found({"transformer": {**LLAMA, "hidden_act": "gelu"}}, {"transformer": LLAMA})


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        (prefix, kind)
        for prefix, family in FAMILIES.items()
        for kind in family
        if keyword_options(family[kind])
    ],
)
def test_every_option_may_be_given_with_its_default(prefix: str, kind: str) -> None:
    """In every member of every registry, a default that is written out changes nothing."""
    member = FAMILIES[prefix][kind]
    defaults = getattr(member.__init__, "__kwdefaults__", None) or {}
    plain = flat({"kind": kind, **REQUIRED.get(kind, {})}, f"{prefix}.")
    whole = with_defaults(plain)
    for name in set(keyword_options(member)) - set(REQUIRED.get(kind, {})):
        given = whole[f"{prefix}.{name}"]
        assert defaults[name] in (None, given)
        assert with_defaults(plain | {f"{prefix}.{name}": given}) == whole, name


def test_records_that_are_not_valid_any_more_stay_as_they_are() -> None:
    """An option or a kind of an older version is a difference, not an error."""
    config = TrainConfig()
    for key, value in (("task", {"kind": "passkey", "x": 1}), ("task", {"kind": "old"})):
        assert differences({**asdict(config), key: value}, config, set())
    assert differences({**asdict(config), "mitigation": "old"}, config, set())


def test_a_run_resumes_with_defaults_written_out(tmp_path: Path) -> None:
    """`--resume` accepts a configuration that means the same; another one is refused."""
    train(tiny("reverse", tmp_path, max_steps=1))
    task = {"kind": "reverse", **tiny("reverse", tmp_path).task, "seed": 0}
    train(tiny("reverse", tmp_path, max_steps=1, task=task), resume=True)
    other = tiny("reverse", tmp_path, max_steps=1, task={**task, "seed": 1})
    with pytest.raises(UserError, match="task.seed"):
        Trainer(other, resume=True, quiet=True)
