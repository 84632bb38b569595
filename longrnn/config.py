"""Configurations: pydantic models or dataclasses, filled from YAML and dotted overrides.

A model states type, range, default and meaning of each key in its `Field`; unknown keys are refused
with the nearest known name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from longrnn.bundled import bundled, find
from longrnn.errors import UserError, nearest
from longrnn.files import expand_home
from longrnn.text import parse_yaml, read_mapping, yaml_text

TRAIN = "configs/train"
C = TypeVar("C")
RECORDED = "train.yaml"  # where a run records its configuration


class Options(BaseModel):
    """A model of options, which refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class InvalidKeyError(UserError):
    """A key of a configuration that is unknown, or has a value that is not valid."""

    def __init__(self, where: str, key: str, reason: str) -> None:
        super().__init__(f"{where}, key {key!r}: {reason}")
        self.key, self.reason = key, reason


def load_config(path: str | Path) -> dict[str, Any]:
    """The values in a YAML file, given by its path or as the name of one in `configs/train`.

    Raises:
        UserError: no such file, or no YAML.
    """
    remedy = f"see {bundled(TRAIN)} for ones that run"
    return read_mapping(find(path, TRAIN), remedy, kind="configuration file")


def build_config(
    kind: type[C], values: Any, overrides: Sequence[str] = (), *, source: str = "configuration"
) -> C:
    """A configuration from nested values.

    Args:
        kind: a pydantic model, or a dataclass whose `__pydantic_config__` forbids unknown keys.
        values: a mapping.
        overrides: `key=value` with dotted keys, for example `model.mixer.d_state=64`.
        source: names the values in errors.

    Raises:
        UserError: an unknown key (the nearest is named), or a value that is not valid.
    """
    if not isinstance(values, dict):
        raise UserError(
            f"{source} must be a mapping of keys to values: write one `key: value` per line"
        )
    return cast(C, validated(kind, overridden(values, overrides), source))


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of nested values with `key=value` overrides, whose keys are dotted.

    Raises:
        UserError: an override of another form, or below something that has no keys.
    """
    result = _copied(values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not key or not equals:
            raise UserError(f"override {override!r} is not of the form key=value: write it so")
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
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return expand_home(value) if isinstance(value, str) else value


@lru_cache(256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # An option that takes texts, such as a list of lengths, may be written without quotes.
    config = None if _keys(kind) else ConfigDict(coerce_numbers_to_str=True)
    return TypeAdapter(kind, config=config)


def validated(kind: Any, value: Any, where: str) -> Any:
    """A value as a type, a pydantic model or a dataclass.

    Args:
        kind: the type, with its annotations.
        value: anything.
        where: what the value is, for errors.

    Raises:
        UserError: it does not fit.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise _refusal(error, kind, where) from error


def _refusal(error: ValidationError, kind: Any, where: str) -> UserError:
    """The sentence for the first thing that does not fit."""
    first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    # The members of a union have their names there, too.
    names = [str(part) for part in first["loc"] if "[" not in str(part)] if _keys(kind) else []
    key, own, given = ".".join(names), first.get("ctx", {}).get("error"), first["input"]
    wanted = first["msg"].removeprefix("Input ").replace("should be", "it must be")
    shown = f", not {given!r}" if not isinstance(given, dict | list) else ""
    reason = f"{wanted[:1].lower()}{wanted[1:]}{shown}; give such a value"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        for name in names[:-1]:
            kind = _keys(kind)[name]
        reason = f"it is unknown; {nearest(names[-1], _keys(kind))}"
    elif isinstance(own, InvalidKeyError):
        key, reason = ".".join([*names, own.key]), own.reason
    elif isinstance(own, UserError):
        reason = str(own)
        if _keys(kind) and not key:
            return own
    return InvalidKeyError(where, key, reason) if key else UserError(f"{where}: {reason}")


def _keys(kind: Any) -> dict[str, Any]:
    """The keys of a model or dataclass, or of the one in a union, and their types."""
    for one in (kind, *get_args(kind)):
        if isinstance(one, type) and (issubclass(one, BaseModel) or is_dataclass(one)):
            return get_type_hints(one)
    return {}


def dump_config(config: BaseModel) -> str:
    """The YAML text that reads back to an equal configuration."""
    return yaml_text(config.model_dump(mode="json"), allow_unicode=True)


class _Kind(BaseModel, extra="allow", strict=True):
    kind: str | None = None


class _Length(BaseModel, extra="allow", strict=True):
    max: int | None = None


class _Recorded(BaseModel, extra="allow", strict=True):
    """What commands read of a recorded configuration."""

    task: _Kind | None = None
    length: _Length | None = None
    max_grad_norm: float | None = None


def read_recorded(folder: Path) -> dict[str, Any]:
    """The configuration that a run recorded in its folder; empty where it recorded none.

    Keys of other versions stay. Those that commands read have the right type, or are missing.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / RECORDED
    if not path.exists():
        return {}
    found = read_mapping(path, "put it back from a copy, or remove it")
    validated(_Recorded, found, str(path))
    given = {"task", "length"}
    return {key: value for key, value in found.items() if value is not None or key not in given}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    if isinstance(tree, dict) and tree:
        items = [flat(value, f"{prefix}{key}.") for key, value in tree.items()]
        return {key: value for item in items for key, value in item.items()}
    return {prefix.rstrip("."): tree}
