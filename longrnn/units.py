"""Lengths as people write them: 256, 4k, 1M (powers of 1024).

A number of tokens that a user gives has the type `TokenCount`: an option of a registered class and
a key of a configuration with this type take `4k` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from longrnn.errors import UserError

UNITS = {"": 1, "k": 1024, "m": 1024**2}
TOKENS = "tokens"
TokenCount = Annotated[int, TOKENS]


def parse_length(text: str) -> int:
    """Tokens that `4k`, `1.5k`, `1M` or `256` mean.

    Raises:
        UserError: anything else, and lengths below 1.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    length = float(match[1]) * UNITS[match[2].lower()] if match else 0.0
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


def with_counts(values: Mapping[str, Any], hints: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`values` with the number that a text such as `4k` means, where a key counts tokens.

    Texts of digits, and values of other types, are left to the checks of types and ranges.

    Args:
        values: of options or keys.
        hints: types by name, with annotations.
        where: what stands before the name in errors.

    Raises:
        UserError: a text that is not a valid length.
    """
    read = dict(values)
    for name, value in values.items():
        text = isinstance(value, str) and not re.fullmatch(r"[+-]?\d+", value)
        if text and is_token_count(hints.get(name)):
            try:
                read[name] = parse_length(value)
            except UserError as error:
                raise UserError(f"{where}{name}: {error}") from error
    return read


def is_token_count(hint: Any) -> bool:
    """Whether a type, read with its annotations, is `TokenCount` or `TokenCount | None`."""
    members = [hint, *get_args(hint)]
    return any(TOKENS in getattr(member, "__metadata__", ()) for member in members)
