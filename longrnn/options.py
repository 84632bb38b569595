"""Options as pydantic models, with lengths such as `4k`, and one sentence for what is not valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from longrnn.errors import UserError, nearest
from longrnn.units import parse_length

O = TypeVar("O", bound="Options")


class Options(BaseModel):
    """A set of options; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _tokens(value: Any) -> Any:
    # YAML reads 1e6 as a float.
    is_text = isinstance(value, str) or (isinstance(value, float) and value.is_integer())
    return parse_length(str(value).removesuffix(".0")) if is_text else value


def _listed(value: Any) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    return list(dict.fromkeys(value)) if isinstance(value, list | tuple) else [value]


def _lengths(value: Any) -> Any:
    return sorted({_tokens(one) for one in _listed(value)})


Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# A number of tokens, as `4096` or `4k`.
Tokens = Annotated[int, BeforeValidator(_tokens), Field(ge=1)]
# Several, as a list or as `256,4k`; ascending, without repeats.
Lengths = Annotated[
    list[Annotated[int, Field(ge=1)]], BeforeValidator(_lengths), Field(min_length=1)
]


def build(kind: type[O], values: Mapping[str, Any], where: str, flag: bool = False) -> O:
    """Build options from a mapping.

    Args:
        kind: the class of the options.
        values: by name.
        where: what the options belong to, for errors.
        flag: whether errors name options as on the command line, `--batch-size`.

    Raises:
        UserError: an unknown or missing option, or a value that is not valid.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "its options"
        if flag:
            name = f"--{name.partition('.')[0].replace('_', '-')}"
        if first["type"] == "extra_forbidden":
            reason = f"unknown option {name!r}: {nearest(name, kind.model_fields)}"
        elif first["type"] == "missing":
            reason = f"option {name!r} is missing: give it"
        elif first["type"] == "value_error":  # raised by our own validators, with its remedy
            reason = f"{name}: {first['ctx']['error']}"
        else:
            wanted = first["msg"].replace("Input should be", "it must be")
            reason = f"{name} is {first['input']!r} and {wanted}: give such a value"
        raise UserError(f"{where}: {reason}") from error
