"""Lengths as people write them: 256, 4k, 1M (powers of 1024).

A number of tokens that a user gives has the type `TokenCount`: an option of a registered class and
a key of a configuration with this type take `4k` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, get_args

from longrnn.errors import UserError

UNITS = {"": 1, "k": 1024, "m": 1024**2}
# As Python and YAML write numbers, with a unit or an exponent.
LENGTH = r"(\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d{1,2}(?![kKmM]))?)([kKmM])?"
TOKENS = "tokens"
TokenCount = Annotated[int, TOKENS]


def parse_length(text: str) -> int:
    """Tokens that `4k`, `1.5k`, `1M`, `256`, `1_000` or `1e6` mean.

    Raises:
        UserError: anything else, and lengths below 1.
    """
    match = re.fullmatch(LENGTH, text.strip())
    length = Decimal(match[1]) * UNITS[(match[2] or "").lower()] if match else Decimal(0)
    if not 1 <= length < 2**63 or length != int(length):
        raise UserError(f"{text!r} is not a valid length: write tokens such as 256, 4k or 1M")
    return int(length)


def parse_lengths(text: str) -> list[int]:
    """Comma-separated lengths, without repeats, in the order given."""
    return list(dict.fromkeys(parse_length(item) for item in text.split(",")))


def format_length(length: int) -> str:
    """The shortest exact form: 4096 is `4k`, 1000 is `1000`."""
    for suffix in ("M", "k"):
        unit = UNITS[suffix.lower()]
        if length >= unit and length % unit == 0:
            return f"{length // unit}{suffix}"
    return str(length)


def with_counts(
    values: Mapping[str, Any], hints: Mapping[str, Any], where: str, prefix: str = ""
) -> dict[str, Any]:
    """`values` with the number that a text such as `4k` means, where a key counts tokens.

    A float counts too, because YAML reads `1e6` as one. Texts of digits, and values of other types,
    are left to the checks of types and ranges.

    Args:
        values: of options or keys.
        hints: types by name, with annotations.
        where: what stands before the name in errors.
        prefix: of the name in errors, such as `length.`.

    Raises:
        UserError: a text or a float that is not a valid length.
    """
    read = dict(values)
    for name, value in values.items():
        text = isinstance(value, str) and not re.fullmatch(r"[+-]?\d+", value)
        if (text or isinstance(value, float)) and is_token_count(hints.get(name)):
            try:
                read[name] = parse_length(str(value).removesuffix(".0"))
            except UserError as error:
                raise UserError(f"{where} {prefix + name!r}: {error}") from error
    return read


def is_token_count(hint: Any) -> bool:
    """Whether a type, read with its annotations, is `TokenCount` or `TokenCount | None`."""
    members = [hint, *get_args(hint)]
    return any(TOKENS in getattr(member, "__metadata__", ()) for member in members)
