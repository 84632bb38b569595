"""Configurations: pydantic models or dataclasses, filled from YAML and dotted overrides."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from longrnn.bundled import bundled, find
from longrnn.errors import UserError
from longrnn.yaml import parse_yaml, read_mapping, yaml_text

TRAIN = "configs/train"
RECORDED = "train.yaml"  # where a run records its configuration


def load_config(path: str | Path) -> dict[str, Any]:
    """The values in a YAML file, given by its path or by its name in `configs/train`.

    Raises:
        UserError: no such file, or no YAML.
    """
    remedy = f"see {bundled(TRAIN)} for configurations that run"
    return read_mapping(find(path, TRAIN), remedy, kind="configuration file")


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of nested values with `key=value` overrides, whose keys are dotted.

    Raises:
        UserError: an override of another form, or below something that has no keys.
    """
    result = _copied(values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not key or not equals:
            raise UserError(f"override {override!r} is not key=value: write it so, or leave it out")
        try:
            value = _copied(parse_yaml(text))
        except ValueError as error:
            raise UserError(
                f"override {override!r} is not YAML ({error}): write its value in quotes"
            ) from error
        *path, last = key.split(".")
        inner = result
        for name in path:
            if inner.get(name) is None:
                inner[name] = {}
            inner = inner[name]
            if not isinstance(inner, dict):
                raise UserError(
                    f"override {override!r}: {name} has no keys below it: leave them out"
                )
        inner[last] = value
    return result


def _copied(value: Any) -> Any:
    """A copy, with `~/` at the beginning of texts expanded, which no shell sees in a file."""
    if isinstance(value, Mapping):
        return {str(key): _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    is_home = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if is_home else value


def dump_config(config: BaseModel) -> str:
    """The YAML text that reads back to an equal configuration."""
    return yaml_text(config.model_dump(mode="json"), allow_unicode=True)


def read_recorded(folder: Path) -> dict[str, Any]:
    """The configuration that a run recorded in its folder; empty where it recorded none.

    Raises:
        UserError: the file cannot be read, or is not YAML.
    """
    path = folder / RECORDED
    return read_mapping(path, "put it back from a copy, or remove it") if path.exists() else {}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    if isinstance(tree, dict) and tree:
        items = [flat(value, f"{prefix}{key}.") for key, value in tree.items()]
        return {key: value for item in items for key, value in item.items()}
    return {prefix.rstrip("."): tree}
