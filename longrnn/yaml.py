"""All reading and writing of YAML; `1e-3` is a number, which it is not in YAML 1.1.

Files of others are read too, so a text is checked before values are made of it: a key occurs
once in its mapping, no value contains itself or has a NUL, and aliases cannot expand a short text
to billions of values.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from longrnn.errors import UserError
from longrnn.files import read_text

# The largest size of a text with every alias written out, in values and characters: this many, or
# this many times the length of the text.
MOST_VALUES, TIMES = 100_000, 10
_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """A loader that takes numbers without a point."""


class _Dumper(yaml.SafeDumper):
    """A dumper that puts texts which look like such numbers in quotes."""


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
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _size(root, {}) > max(MOST_VALUES, TIMES * len(text)):
            raise ValueError("its aliases expand to too many values")
        return loader.construct_document(root)
    except Exception as error:  # yaml raises errors of many kinds, a KeyError for `!!bool x`
        raise ValueError(" ".join(str(error).split())) from error


def yaml_text(content: Any, **options: Any) -> str:
    """Return the YAML text that `parse_yaml` reads back; `options` are those of `yaml.dump`."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, **options)


def _size(node: yaml.Node, sizes: dict[yaml.Node, int | None]) -> int:
    """Return the values and characters of a node with every alias written out.

    Args:
        node: of a parsed text.
        sizes: of the nodes that were visited; None for those that contain this node.

    Raises:
        ValueError: a value contains itself, or a mapping has a key twice.
    """
    if node in sizes:
        size = sizes[node]
        if size is None:
            raise ValueError("a value contains itself")
        return size
    sizes[node] = None
    children = []
    if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
        raise ValueError("a text has the character NUL")
    if isinstance(node, yaml.MappingNode):
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"the key {twice[0]!r} occurs twice")
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 if children else 1 + len(node.value)
    size += sum(_size(child, sizes) for child in children)
    sizes[node] = size
    return size
