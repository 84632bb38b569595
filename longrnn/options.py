"""Options as pydantic models, with lengths such as `4k`, and one sentence for what is not valid."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from longrnn.errors import UserError, nearest
from longrnn.units import parse_length


class InvalidOptionError(UserError):
    """An option that is unknown or missing, or whose value is not valid."""

    def __init__(self, key: str, reason: str, where: str = "") -> None:
        super().__init__(f"{where}{', ' if where else ''}option {key!r}: {reason}")
        self.key, self.reason = key, reason


class Options(BaseModel):
    """A set of options; unknown ones are refused. The text below an option is its description.

    Raises:
        UserError: an unknown or missing option, or a value that is not valid.
    """

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True
    )

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, {name: name for name in type(self).model_fields}) from error


def _tokens(value: Any) -> Any:
    # YAML reads 1e6 as a float.
    return parse_length(str(value)) if isinstance(value, str | float) else value


def listed(value: Any) -> Any:
    """Return a list of the values in `a,b`, in a list, or of a single value."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list | tuple) else [value]


def _ranges(value: Any) -> Any:
    """Return the numbers that `4-12,20` names."""
    numbers: list[Any] = []
    for part in listed(value):
        match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", str(part))
        named = range(int(match[1]), int(match[2]) + 1) if match else ()
        numbers += named or [part]  # a number, or what is not valid
    return numbers


def _ascending(values: list[Any]) -> list[Any]:
    return sorted(set(values))


T = TypeVar("T")
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
# A number of tokens, as `4096` or `4k`.
Tokens = Annotated[int, BeforeValidator(_tokens), Field(ge=1, lt=2**63)]
# Several numbers, as a list or as `256,4k`; ascending, without repeats.
Ascending = Annotated[
    list[T], BeforeValidator(listed), Field(min_length=1), AfterValidator(_ascending)
]
Lengths = Ascending[Tokens]
# Numbers of layers, also as `4-12,20`.
Layers = Annotated[Ascending[Annotated[int, Field(ge=0)]], BeforeValidator(_ranges)]


def explain(error: ValidationError, names: Mapping[str, str], where: str = "") -> UserError:
    """Return the first error in words.

    Args:
        error: what pydantic says.
        names: of the options, as the user writes them.
        where: what the options belong to.
    """
    # An unknown option goes first: it may stand for the missing option.
    unknown = ("extra_forbidden", "unexpected_keyword_argument")
    first = max(
        error.errors(include_url=False),
        key=lambda details: (details["type"] in unknown, len(details["loc"])),
    )
    is_unknown, place = first["type"] in unknown, [str(part) for part in first["loc"]]
    # The members of a union have their names there, too.
    path = [part for part in place if "[" not in part or (is_unknown and part is place[-1])]
    path[:1] = [names.get(name, name) for name in path[:1]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidOptionError):
        path, reason = [*path, cause.key], cause.reason
    elif isinstance(cause, UserError):
        reason = str(cause)
    elif is_unknown:
        reason = f"it is unknown; {nearest(path[-1], names.values())}"
    elif first["type"] == "missing":
        reason = "it is missing; give it"
    elif first["type"] == "too_short":
        least = first.get("ctx", {})["min_length"]
        reason = f"it needs at least {least} value; give more, or leave it out"
    else:
        wanted = first["msg"].removeprefix("Input ").replace("should be", "it must be")
        shown = f", not {first['input']!r}" if not isinstance(first["input"], dict | list) else ""
        reason = f"{wanted[:1].lower()}{wanted[1:]}{shown}; give such a value"
    if path:
        return InvalidOptionError(".".join(path), reason, where)
    return UserError(f"{where}: {reason}" if where else reason)


@lru_cache(256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # An option that takes texts, such as a list of lengths, may be written without quotes.
    config = None if hasattr(kind, "__annotations__") else ConfigDict(coerce_numbers_to_str=True)
    return TypeAdapter(kind, config=config)


def validated(kind: Any, value: Any, where: str) -> Any:
    """Return a value as a type, a pydantic model or a dataclass.

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
        fields = getattr(kind, "__annotations__", {})
        names = {name: name for name in fields if not name.startswith("_")}
        raise explain(error, names, where) from error
