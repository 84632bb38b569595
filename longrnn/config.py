"""Configurations: dataclasses filled from YAML and dotted overrides, nothing unknown.

A field of a dataclass states its range (`longrnn.ranges`), which `check_ranges` enforces.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from longrnn.bundled import bundled, find
from longrnn.errors import UserError, nearest
from longrnn.files import expand_home
from longrnn.ranges import choices_of, meaning_of_true
from longrnn.text import read_mapping, read_regular
from longrnn.units import with_counts

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException

C = TypeVar("C")
# The value of a key that the user must give.
OPEN = "???"

# Where a run records its configuration, and what its commands read there.
RECORDED = "train.yaml"
RECORDED_TYPES: dict[str, tuple[type, ...]] = {
    "task": (dict,),
    "task.kind": (str,),
    "transformer": (dict,),
    "length": (dict,),
    "length.max": (int,),
    "max_grad_norm": (int, float),
    "max_grad_value": (int, float),
}
TYPE_NAMES = {dict: "a mapping", str: "text", int: "a whole number", float: "a number"}


def load_config(
    kind: type[C],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    examples: str = "configs/train",
) -> C:
    """Reads a YAML file onto a dataclass.

    Args:
        kind: the dataclass.
        path: the YAML file, or the name of one in `examples`.
        overrides: `key=value` with dotted keys, for example `model.mixer.d_state=64`.
        examples: the bundled folder with files of this kind.

    Raises:
        UserError: no such file, no YAML, an empty file, an unknown key (the nearest is named), or a
            value of the wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = find(path, examples)
    remedy = f"see {bundled(examples)} for ones that run"
    content = read_regular(path, remedy, kind="configuration file")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(content.decode())))
    except (YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, a bad date
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not YAML ({reason}): {remedy}") from error
    except OmegaConfBaseException as error:  # an interpolation that does not end
        raise _unfit(str(path), error) from error
    except (OSError, TypeError) as error:  # what omegaconf raises for a number, or a key of a list
        raise UserError(
            f"{path} cannot be read as a mapping of keys to values ({error}): {remedy}"
        ) from error
    config = build_config(kind, loaded, overrides, source=str(path))
    if not loaded:
        raise UserError(f"{path} is empty: {remedy}")
    return config


def build_config(
    kind: type[C], values: Any, overrides: Sequence[str] = (), *, source: str = "configuration"
) -> C:
    """`load_config` from a mapping; `source` names it in errors."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not isinstance(values, dict):
        raise UserError(
            f"{source} must be a mapping of keys to values: write one `key: value` per line"
        )
    for override in overrides:
        if override.find("=") < 1:
            raise UserError(f"override {override!r} is not of the form key=value: write it so")
    try:
        dotted: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
        values, dotted = _with_home(values), _with_home(dotted)
        _check_keys(kind, values, source)
        _check_keys(kind, dotted, "override")
        _refuse_open(values, dotted, source)
        merged = OmegaConf.structured(kind)
        for given in (_words(kind, values, source), _words(kind, dotted, "override")):
            for key in _emptied(kind, given):
                parent = key.rpartition(".")[0]
                if parent and OmegaConf.select(merged, parent) is None:
                    merged = OmegaConf.merge(merged, given)  # with the defaults of what was None
                OmegaConf.update(merged, key, {}, merge=False)
            merged = OmegaConf.merge(merged, given)
        return cast(C, OmegaConf.to_object(merged))
    except OverflowError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{source} holds a number that is too large ({reason}): lower it"
        ) from error
    except OmegaConfBaseException as error:
        raise _unfit(source, error) from error
    except YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"an override is not YAML ({reason}): write its value in quotes") from error


def _unfit(source: str, error: OmegaConfBaseException) -> UserError:
    """The error for a value that omegaconf refuses."""
    reason = str(error).splitlines()[0]
    return UserError(f"{source}, key {error.full_key!r}: {reason}; write a value of the right type")


def _with_home(value: Any) -> Any:
    """Expands `~/` at the beginning of texts, which no shell sees in a configuration."""
    if isinstance(value, dict):
        return {key: _with_home(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_home(one) for one in value]
    return expand_home(value) if isinstance(value, str) else value


def _refuse_open(values: dict[str, Any], dotted: dict[str, Any], source: str) -> None:
    """Refuses a key whose value is `???` unless an override gives it one."""
    given = flat(dotted)
    for key, value in flat(values).items():
        if value == OPEN and not any(key == one or key.startswith(f"{one}.") for one in given):
            raise UserError(f"{source} leaves {key} open, as {OPEN}: give it a value, {key}=VALUE")


def dump_config(config: Any) -> str:
    """The YAML text that `load_config` reads back to an equal configuration."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


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
    if isinstance(tree, dict):
        items = [flat(value, f"{prefix}{key}.") for key, value in tree.items()]
        return {key: value for item in items for key, value in item.items()}
    return {prefix.rstrip("."): tree}


def nested(keys: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The mapping that `flat` turned into dotted keys, for keys that begin with `prefix`."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *above, last = key.removeprefix(prefix).split(".")
        inner = tree
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return tree


def _emptied(kind: Any, values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of the free mappings that `values` gives as empty.

    Merged with a default, they would be that default without a word: their registry refuses them.
    """
    hints = get_type_hints(kind)
    for key, value in values.items():
        hint = _given(hints[key])
        if get_origin(hint) is dict and not value:
            yield f"{prefix}{key}"
        elif is_dataclass(hint) and value is not None:
            yield from _emptied(hint, value, f"{prefix}{key}.")


def _given(hint: Any) -> Any:
    """The type of a value that is given: `T` of `T | None`, any other type as it is."""
    if get_origin(hint) in (Union, UnionType):
        members = [member for member in get_args(hint) if member is not NoneType]
        return members[0] if len(members) == 1 else hint
    return hint


def _words(kind: Any, values: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """`values` as their keys mean them: words that are not booleans, and numbers for `4k`.

    YAML 1.1 reads some words as booleans. `no` comes back where it is a choice of the key, and true
    where it means one of them.

    Raises:
        UserError: any other boolean for a text, whose spelling is lost; or a text that is not a
            valid length, for a number of tokens.
    """
    hints = get_type_hints(kind)
    annotated = get_type_hints(kind, include_extras=True)
    words = with_counts(values, annotated, f"{source}, key", prefix)
    for field in fields(kind):
        name, value = field.name, values.get(field.name)
        hint = _given(hints[name])
        if is_dataclass(hint) and isinstance(value, dict):
            words[name] = _words(hint, value, source, f"{prefix}{name}.")
            continue
        if value is False and "no" in choices_of(field):
            words[name] = "no"
            continue
        if value is True and (word := meaning_of_true(field)) is not None:
            words[name] = word
            continue
        if takes_text(hint):
            refuse_booleans(value, f"{source}, key {prefix + name!r}")
    return words


def takes_text(hint: Any) -> bool:
    """Whether a type is a text or a list of texts, and no boolean belongs to it."""
    parts = [hint, *get_args(hint)]
    parts += [inner for part in get_args(hint) for inner in get_args(part)]
    return get_origin(hint) is not dict and str in parts and not {bool, Any} & set(parts)


def refuse_booleans(value: Any, where: str) -> None:
    """Refuses a boolean, or a list with one, for a text or a list of texts.

    Args:
        value: of any type.
        where: names file and key, for the error.

    Raises:
        UserError: such a value.
    """
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool):
            raise UserError(
                f"{where}: YAML reads yes, no, on, off, true and false as booleans, and a text is "
                "wanted: put the word into quotes inside the YAML, as in \"'no'\""
            )


def _check_keys(kind: Any, values: Any, source: str, prefix: str = "") -> None:
    """Refuses keys that the dataclass lacks; free mappings inside it are left to their registry.

    A dataclass may say in `FORMER` what to write for keys that it once had.
    """
    key = prefix.removesuffix(".")
    if values is None and _given(kind) is not kind:
        return
    kind = _given(kind)
    if get_origin(kind) is list and isinstance(values, dict):
        raise UserError(
            f"{source}, key {key!r}: it takes a list, not {values!r}; write [value, value]"
        )
    if not (is_dataclass(kind) or get_origin(kind) is dict):
        return
    if not isinstance(values, dict):
        raise UserError(
            f"{source}, key {key!r}: it takes a mapping of keys, not {values!r}; "
            "write {name: value}"
        )
    if not is_dataclass(kind):
        return
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    former: dict[str, str] = getattr(kind, "FORMER", {})
    for key, value in values.items():
        if key in former:
            raise UserError(f"{source}: key {prefix}{key} was replaced: {former[key]}")
        if key not in known:
            raise UserError(f"{source}: unknown key {prefix}{key}: {nearest(str(key), known)}")
        _check_keys(hints[key], value, source, f"{prefix}{key}.")
