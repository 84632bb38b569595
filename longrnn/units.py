"""Lengths as people write them: 256, 4k, 1M (powers of 1024); the range of seeds."""

from __future__ import annotations

import re

from longrnn.errors import UserError

UNITS = {"": 1, "k": 1024, "m": 1024**2}


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
