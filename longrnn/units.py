"""Lengths as people write them: 256, 4k, 1M (powers of 1024), and numbers of things.

See `longrnn.options.Tokens`.
"""

import re
from decimal import Decimal

from longrnn.errors import UserError

UNITS = {"": 1, "k": 1024, "m": 1024**2}
# As Python and YAML write numbers, with a unit or an exponent.
LENGTH = r"(\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d{1,2}(?![kKmM]))?)([kKmM])?"


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


def counted(number: int, noun: str) -> str:
    """A number and what it counts: `1 step`, `1,500 steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
