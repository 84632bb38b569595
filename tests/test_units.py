"""Lengths as people write them."""

import pytest

from longrnn.errors import UserError
from longrnn.options import Layers, Lengths, validated
from longrnn.seeds import mix
from longrnn.units import format_length, parse_length, parse_lengths


@pytest.mark.parametrize(
    ("text", "length"),
    [("1", 1), ("256", 256), ("4k", 4096), ("4K", 4096), (" 16k ", 16384)]
    + [("1M", 2**20), ("1m", 2**20), ("1.5k", 1536), ("0.5k", 512), ("1000", 1000)]
    + [("1_000", 1000), ("1_5k", 15360), ("1e6", 10**6), ("1E+3", 1000), ("1.5e1", 15)]
    + [("9007199254740993", 2**53 + 1)],
)
def test_lengths_that_parse(text: str, length: int) -> None:
    """Units are powers of 1024, in either case."""
    assert parse_length(text) == length


NOT_LENGTHS = "0 0k -1 4x k 4kk 1e3k 1e-3 1e 1.5 0.3k 1,5k inf nan +4 0x10 1e99 1e999 _1 1_ 1__0"
NOT_LENGTHS += f" {2**63}"


@pytest.mark.parametrize("text", ["", " ", "4 k", "9" * 400, *NOT_LENGTHS.split()])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_length(text)


def test_lists_keep_their_order_without_repeats() -> None:
    assert validated(Lengths, "4k,256,4096", "lengths") == [256, 4096]
    assert parse_lengths("4k,256,1k,4096, 256") == [4096, 256, 1024]
    for text in ("", "256,", ",256", "256,,512", "256;512"):
        with pytest.raises(UserError):
            parse_lengths(text)


def test_ranges_of_layers() -> None:
    assert validated(Layers, "4-6,20,5", "layers") == [4, 5, 6, 20]
    for text in ("", "6-4", "a-b", "-1", "1-", "1.5"):
        with pytest.raises(UserError, match=f"not '{text}'"):
            validated(Layers, text, "layers")


@pytest.mark.parametrize(
    ("length", "text"),
    [(1, "1"), (1000, "1000"), (1024, "1k"), (1536, "1536"), (2**20, "1M"), (3 * 2**19, "1536k")],
)
def test_the_shortest_exact_form(length: int, text: str) -> None:
    """A length is formatted exactly: 1000 is not 1k."""
    assert format_length(length) == text


def test_seeds_of_other_parts_are_other_seeds() -> None:
    """Where one part ends and the next one begins counts."""
    assert len({mix(1, 23), mix(12, 3), mix("1", 2, 3), mix(3, 12)}) == 4
