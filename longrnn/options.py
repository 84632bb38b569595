"""Options as pydantic models, with lengths such as `4k`, and one sentence for what is not valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from longrnn.errors import UserError, nearest
from longrnn.units import parse_length


class Options(BaseModel):
    """A set of options; unknown ones are refused.

    Raises:
        UserError: an unknown or missing option, or a value that is not valid.
    """

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            names = {name: name for name in type(self).model_fields}
            raise UserError(explain(error, names)) from error


def _tokens(value: Any) -> Any:
    # YAML reads 1e6 as a float.
    is_text = isinstance(value, str) or (isinstance(value, float) and value.is_integer())
    return parse_length(str(value).removesuffix(".0")) if is_text else value


def listed(value: Any) -> Any:
    """Return a list without repeats of `a,b`, of a list, or of a single value."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    return list(dict.fromkeys(value)) if isinstance(value, list | tuple) else [value]


def _lengths(value: Any) -> Any:
    return sorted({_tokens(one) for one in listed(value)})


Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# A number of tokens, as `4096` or `4k`.
Tokens = Annotated[int, BeforeValidator(_tokens), Field(ge=1)]
# Several, as a list or as `256,4k`; ascending, without repeats.
Lengths = Annotated[
    list[Annotated[int, Field(ge=1)]], BeforeValidator(_lengths), Field(min_length=1)
]


def explain(error: ValidationError, names: Mapping[str, str]) -> str:
    """Return the first error in words.

    Args:
        error: what pydantic says.
        names: of the options, as the user writes them.
    """
    first = error.errors()[0]
    field, *inner = first["loc"] or ("an option",)
    name = ".".join(map(str, [names.get(str(field), field), *inner]))
    if first["type"] == "extra_forbidden":
        return f"unknown option {name!r}: {nearest(name, names)}"
    if first["type"] == "missing":
        return f"option {name!r} is missing: give it"
    if first["type"] == "value_error":  # raised by our own validators, with its remedy
        return f"{name}: {first.get('ctx', {})['error']}"
    wanted = first["msg"].replace("Input should be", "must be")
    return f"{name} is {first['input']!r} and {wanted}: give such a value"
