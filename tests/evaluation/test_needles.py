"""Needles in a haystack: hidden lines, questions, and the length of the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longrnn.data.prompts import FILLER
from longrnn.errors import UserError
from longrnn.evaluation.harness.needles import KINDS, Haystack, needles, variable_tracking
from longrnn.text import ByteTokenizer

BYTES = ByteTokenizer()
HIDDEN = re.compile(r"One of the special magic numbers for (\S+) is: (\d+)\.")


@pytest.mark.parametrize("length", [1024, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_needles(kind: str, length: int) -> None:
    """Every number of the answer is in the text, and the question names its key."""
    example, counts = needles(kind, Haystack(), BYTES, length, "0/0"), KINDS[kind]
    hidden = HIDDEN.findall(example.text)
    assert len(hidden) == counts.keys * counts.values
    asked = re.search(r"for ([^?]+?) mentioned", example.text.splitlines()[-1])
    assert asked is not None
    names = asked[1].split(", ")
    assert len(names) == counts.asked
    assert sorted(example.outputs) == sorted(v for key, v in hidden if key in names)
    assert all(name in example.prefix for name in names)
    tokens = len(BYTES.encode(f"{example.text} {example.prefix}"))
    assert length - 40 < tokens <= length


def test_the_rest_is_filler() -> None:
    """Without its needles, the text is the filler, with whole words and sentences."""
    example = needles("multivalue", Haystack(), BYTES, 3000, "0/1")
    body = example.text.split("\n")[1]
    left = " ".join(HIDDEN.sub("", body).split())
    assert (FILLER * 40).startswith(left)
    assert left.endswith(".")


def test_needles_differ() -> None:
    """Texts differ by name, and one name always gives the same text."""
    texts = [needles("single", Haystack(), BYTES, 600, f"0/{i}").text for i in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]


def test_variable_tracking() -> None:
    """The assignments are a chain in order, and its names are the answer."""
    example = variable_tracking(Haystack(), BYTES, 2500, "0/0")
    text = example.text.split("Memorize and track")[-1]
    value = re.search(r"VAR (\w+) = (\d+)\.", text)
    assert value is not None
    chain = [value[1]]
    for name, before in re.findall(r"VAR (\w+) = VAR (\w+)\.", text[value.end() :]):
        assert before == chain[-1]
        chain.append(name)
    assert chain == example.outputs
    assert len(chain) == 5
    assert f"assigned the value {value[2]} in" in text
    assert value[2] in example.prefix
    assert 2460 < len(BYTES.encode(f"{example.text} {example.prefix}")) <= 2500
    worked = example.text.split("\n\n")[1]
    assert worked.count("VAR") == 1 + 2 * 4


def test_own_haystack(tmp_path: Path) -> None:
    """Words of a file keep their order; a file or length that is too short is refused."""
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{i}" for i in range(500)))
    example = needles("single", Haystack(path), BYTES, 1000, "0/0")
    words = re.findall(r"w\d+", example.text)
    assert words == [f"w{i}" for i in range(len(words))]
    with pytest.raises(UserError, match="500"):
        needles("single", Haystack(path), BYTES, 10_000, "0/0")
    with pytest.raises(UserError, match="100"):
        needles("single", Haystack(), BYTES, 100, "0/0")
