"""Configurations: pydantic models or dataclasses, filled from YAML and dotted overrides.

A model states type, range, default and meaning of each key in its `Field`; unknown keys are refused
with the nearest known name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from longrnn.bundled import bundled, find
from longrnn.errors import UserError, nearest
from longrnn.files import expand_home
from longrnn.text import parse_yaml, read_mapping

C = TypeVar("C")
# Where a run records its configuration, and what its commands read there.
RECORDED = "train.yaml"
RECORDED_TYPES: dict[str, tuple[type, ...]] = {
    "task": (dict,),
    "task.kind": (str,),
    "length": (dict,),
    "length.max": (int,),
    "max_grad_norm": (int, float),
}
TYPE_NAMES = {dict: "a mapping", str: "text", int: "a whole number", float: "a number"}


class Options(BaseModel):
    """A model of options, which refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


def load_config(
    kind: type[C],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    examples: str = "configs/train",
) -> C:
    """Reads a YAML file as a configuration.

    Args:
        kind: the model or dataclass.
        path: the YAML file, or the name of one in `examples`.
        overrides: `key=value` with dotted keys, for example `model.mixer.d_state=64`.
        examples: the bundled folder with files of this kind.

    Raises:
        UserError: no such file, no YAML, an unknown key (the nearest is named), or a value of the
            wrong type.
    """
    path = find(path, examples)
    remedy = f"see {bundled(examples)} for ones that run"
    values = read_mapping(path, remedy, kind="configuration file")
    return build_config(kind, values, overrides, source=str(path))


def build_config(
    kind: type[C], values: Any, overrides: Sequence[str] = (), *, source: str = "configuration"
) -> C:
    """`load_config` from a mapping; `source` names it in errors."""
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
    has_own = any(hasattr(kind, name) for name in ("model_fields", "__dataclass_fields__"))
    return TypeAdapter(kind, config=None if has_own else ConfigDict(coerce_numbers_to_str=True))


def validated(kind: Any, value: Any, where: str) -> Any:
    """A value as a type, a pydantic model or a dataclass.

    Args:
        kind: the type, with its annotations.
        value: anything.
        where: what the value is, for errors.

    Raises:
        UserError: it does not fit.
    """
    if is_dataclass(kind) and isinstance(value, Mapping):
        _check_names(value, [field.name for field in fields(kind)], where)
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise _refusal(error, kind, where) from error


def _check_names(
    value: Mapping[str, Any], known: Sequence[str], where: str, above: str = ""
) -> None:
    for name in value:
        if name not in known:
            raise UserError(f"{where}: unknown key {above}{name}: {nearest(str(name), known)}")


def _refusal(error: ValidationError, kind: Any, where: str) -> UserError:
    """The sentence for the first thing that does not fit."""
    first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    names = [str(part) for part in first["loc"]]
    # The members of a union have their names there, too.
    key = ".".join(name for name in names if "[" not in name)
    if first["type"] == "extra_forbidden":
        known = _known(kind, names[:-1])
        return UserError(f"{where}: unknown key {key}: {nearest(names[-1], known)}")
    is_config = any(hasattr(kind, name) for name in ("model_fields", "__dataclass_fields__"))
    at = f"{where}, key {key!r}" if key and is_config else where
    own = first.get("ctx", {}).get("error")
    if isinstance(own, UserError):
        return UserError(str(own) if is_config and not key else f"{at}: {own}")
    wanted = first["msg"].removeprefix("Input ").replace("should be", "it must be")
    given = first["input"]
    shown = f", not {given!r}" if not isinstance(given, dict | list) else ""
    return UserError(f"{at}: {wanted[:1].lower()}{wanted[1:]}{shown}; give such a value")


def _known(kind: Any, path: Sequence[str]) -> list[str]:
    """The keys of a model, or of one inside it."""
    for name in path:
        kind = kind.model_fields[name].annotation
        kind = next(
            (one for one in (kind, *getattr(kind, "__args__", ())) if hasattr(one, "model_fields")),
            kind,
        )
    return list(getattr(kind, "model_fields", {}))


def as_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values."""
    return config.model_dump(mode="json") if isinstance(config, BaseModel) else asdict(config)


def dump_config(config: Any) -> str:
    """The YAML text that `load_config` reads back to an equal configuration."""
    import yaml

    return yaml.safe_dump(as_dict(config), sort_keys=False, allow_unicode=True)


def read_recorded(folder: Path) -> dict[str, Any]:
    """The configuration that a run recorded in its folder; empty where it recorded none.

    Keys of other versions stay. Those that commands read have the right type.

    Raises:
        UserError: the file is damaged.
    """
    path, remedy = folder / RECORDED, "put it back from a copy, or remove it"
    if not path.exists():
        return {}
    found = read_mapping(path, remedy)
    for key, kind in RECORDED_TYPES.items():
        head, _, rest = key.partition(".")
        value = found.get(head)
        if rest and isinstance(value, dict):
            value = value.get(rest)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            wanted = " or ".join(TYPE_NAMES[one] for one in kind)
            raise UserError(f"{path}, key {key!r}: it must be {wanted}, not {value!r}; {remedy}")
    # A mapping that is null is one that was not given.
    return {k: v for k, v in found.items() if v is not None or RECORDED_TYPES.get(k) != (dict,)}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    if isinstance(tree, dict) and tree:
        items = [flat(value, f"{prefix}{key}.") for key, value in tree.items()]
        return {key: value for item in items for key, value in item.items()}
    return {prefix.rstrip("."): tree}
