"""YAML: what is written is read again, and hostile or mistaken texts are refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.yaml import parse_yaml, read_mapping, yaml_text

pytestmark = pytest.mark.core

BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("value", ["12e4567890123456", "1e5", "true", "3", 1e-05, 12.0, None])
def test_what_is_written_as_yaml_is_read_again(value: object) -> None:
    """A fingerprint that looks like a number stays a text."""
    assert parse_yaml(yaml_text({"fingerprint": value})) == {"fingerprint": value}
    assert parse_yaml("1e3-run") == "1e3-run"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "too many values"),
        (MERGED, "too many values"),
        ("a: &a [*a]", "contains itself"),
        ("a: &a {b: [*a]}", "contains itself"),
        ("seed: 1\nseed: 2", "'seed' occurs twice"),
        ("task: {kind: copy, kind: sort}", "'kind' occurs twice"),
        ("[" * 5000, "recursion"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    """The file and the reason are named, before anything is made of the values."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=f"a.yaml.*{reason}"):
        read_mapping(tmp_path / "a.yaml", "write it again")


def test_aliases_and_merged_mappings_are_read() -> None:
    """An alias is the value that it names, and keys of a mapping go before merged ones."""
    text = "a: &a {x: 1, y: 2}\nb: [*a, *a]\nc: {<<: *a, y: 3}"
    assert parse_yaml(text)["b"] == [{"x": 1, "y": 2}] * 2
    assert parse_yaml(text)["c"] == {"x": 1, "y": 3}
