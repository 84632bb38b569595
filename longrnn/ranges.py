"""Ranges and choices of configuration keys, declared with the fields of their dataclasses.

`learning_rate: float = number(2e-3, above=0)` states the range where the default is; every error
about a number is then made in one place, `check_ranges`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, NamedTuple

from longrnn.errors import UserError, nearest

RANGE, CHOICES, TRUE, REMEDY = "range", "choices", "true", "remedy"
# What sizes a tensor or counts steps: more cannot be allocated or numbered.
LARGEST_SIZE = 2**31 - 1
LARGEST_FLOAT32 = 3.4028234663852886e38


class Range(NamedTuple):
    """Bounds of a number; None where there is none. A NaN is in no range.

    Attributes:
        at_least: the least allowed number.
        above: a number below all allowed ones.
        at_most: the largest allowed number.
        below: a number above all allowed ones.
        infinite: whether an infinity that the bounds allow is allowed.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False

    def broken(self, value: float) -> str | None:
        """What a value must be and is not, such as `at least 0`; None where it is in the range."""
        if math.isnan(value) or (math.isinf(value) and not self.infinite):
            return "a number" if self.infinite else "finite"
        if self.at_least is not None and value < self.at_least:
            return f"at least {self.at_least}"
        if self.above is not None and value <= self.above:
            return f"above {self.above}"
        if self.at_most is not None and value > self.at_most:
            return f"at most {self.at_most}"
        if self.below is not None and value >= self.below:
            return f"below {self.below}"
        return None


def within(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    remedy: str | None = None,
) -> dict[str, Any]:
    """The metadata of a field with a number, or a mapping of names to numbers, in a range.

    Args:
        at_least: see `Range`, as for the others.
        above: likewise.
        at_most: likewise.
        below: likewise.
        infinite: likewise.
        remedy: what to do instead of giving a number outside the range, where it is not to give
            one inside.
    """
    return {RANGE: Range(at_least, above, at_most, below, infinite), REMEDY: remedy}


def number(default: float | None, **bounds: Any) -> Any:
    """A dataclass field with a number; `bounds` are those of `within`."""
    return field(default=default, metadata=within(**bounds))


def count(default: int | None, *, at_least: int = 1, at_most: int = LARGEST_SIZE) -> Any:
    """A dataclass field with a whole number of things."""
    return number(default, at_least=at_least, at_most=at_most)


def choice(default: str, choices: Sequence[str], *, true: str | None = None) -> Any:
    """A dataclass field with one of several words; `true` is the word that a boolean true means."""
    return field(default=default, metadata={CHOICES: tuple(choices), TRUE: true})


def choices_of(declared: Field[Any]) -> tuple[str, ...]:
    """The words that a field takes; none where it was not declared by `choice`."""
    return declared.metadata.get(CHOICES, ())


def meaning_of_true(declared: Field[Any]) -> str | None:
    """The word that a boolean true means for a field; None where it means nothing."""
    return declared.metadata.get(TRUE)


def check_count(name: str, value: int, *, at_least: int = 1, at_most: int = LARGEST_SIZE) -> None:
    """Refuses a number of things that is out of range.

    Raises:
        UserError: such a number.
    """
    if not at_least <= value <= at_most:
        raise UserError(
            f"{name} must be from {at_least:,} to {at_most:,}, not {value}: give such a number"
        )


def check_ranges(config: Any, prefix: str = "") -> None:
    """Refuses values outside the ranges and choices of a dataclass, and of those inside it.

    Args:
        config: an instance.
        prefix: of its keys in errors, such as `length.`.

    Raises:
        UserError: such a value; the sentence names key, range and default.
    """
    for declared in fields(config):
        value, name = getattr(config, declared.name), f"{prefix}{declared.name}"
        if is_dataclass(value):
            check_ranges(value, f"{name}.")
            continue
        words = choices_of(declared)
        if words and value not in words:
            raise UserError(f"unknown {name} {value!r}: {nearest(str(value), words)}")
        bounds: Range | None = declared.metadata.get(RANGE)
        if bounds is None:
            continue
        for key, entry in _numbers(name, value):
            if (wanted := bounds.broken(entry)) is not None:
                raise UserError(f"{key} must be {wanted}, not {entry}: {_remedy(declared)}")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a field, each with its key in errors."""
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", entry) for key, entry in value.items())
    elif value is not None:
        yield name, value


def _remedy(declared: Field[Any]) -> str:
    if declared.metadata[REMEDY] is not None:
        return declared.metadata[REMEDY]
    default = declared.default
    if default is MISSING:
        return "give such a number, or leave the entry out"
    usual = "" if default is None else f" for {default}"
    return f"give such a number, or leave {declared.name} out{usual}"
