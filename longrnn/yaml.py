"""All reading and writing of YAML; `1e-3` is a number, which it is not in YAML 1.1.

Files of others are read too. A key occurs once in its mapping, no text has a NUL, and there are no
aliases, by which a short text could expand to billions of values or contain itself.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from longrnn.errors import UserError
from longrnn.files import read_text

_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """A loader that takes numbers without a point, and refuses what the module does not accept."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event().anchor
            raise ValueError(f"it has the alias *{alias}, in place of which write the value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"the key {twice[0]!r} occurs twice")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if "\0" in text or any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ValueError("a text has the character NUL, or half a surrogate pair")
        return text


class _Dumper(yaml.SafeDumper):
    """A dumper that puts texts which look like such numbers in quotes, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def read_mapping(path: Path, remedy: str, *, kind: str = "file") -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Raises:
        UserError: a file that cannot be read, that is not YAML, or that holds something else.
    """
    text, _ = read_text(path, remedy, kind=kind)
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path} is not YAML ({error}): {remedy}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path} must hold a mapping of names to values: {remedy}")
    return content


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: it is not YAML that is accepted here; the message says why, on one line.
    """
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # yaml raises errors of many kinds, a KeyError for `!!bool x`
        raise ValueError(" ".join(str(error).split())) from error


def yaml_text(content: Any, **options: Any) -> str:
    """Return the YAML text that `parse_yaml` reads back; `options` are those of `yaml.dump`."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, **options)
