"""The documented table of mitigations and cells equals the code, and undefined pairs raise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from longrnn.mitigations.table import support_table

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS, Mitigated, mitigation
from tests.contracts.builders import DEFINED, UNDEFINED, build_model, spec_id

DOCUMENT = Path(__file__).parents[2] / "docs/repair.md"
NOTE = re.compile(r"no \((\d+)\)")


def test_the_document_contains_the_table() -> None:
    """docs/repair.md has the output of `support_table()` between the two comments."""
    found = re.findall(
        r"^<!-- table -->\n(.*?)\n<!-- /table -->$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found == [support_table()]


def test_the_table_equals_the_code() -> None:
    """Every pair has its cell, and every undefined pair its reason."""
    table, _, below = support_table().partition("\n\n")
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    assert head == ["", *MIXERS]
    assert [row[0] for row in rows] == [f"`{name}`" for name in MITIGATIONS]
    notes = dict(line.split(". ", 1) for line in below.splitlines())
    for name, *cells in rows:
        member = MITIGATIONS[name.strip("`")]
        for mixer, cell in zip(MIXERS.values(), cells, strict=True):
            reason = member.undefined(mixer)
            note = NOTE.fullmatch(cell)
            assert (cell == "yes") == (reason is None)
            assert (None if note is None else notes[note[1]]) == reason


@pytest.mark.parametrize(("spec", "mixer"), UNDEFINED, ids=spec_id)
def test_undefined_pairs_are_refused(spec: dict[str, Any], mixer: dict[str, Any]) -> None:
    """The error gives the reason, alone and in a chain."""
    reason = MITIGATIONS[spec["kind"]].undefined(MIXERS[mixer["kind"]])
    assert reason
    for member in (mitigation(spec), mitigation(["none", spec])):
        with pytest.raises(UserError) as caught:
            Mitigated(build_model(mixer), member)
        expected = f"{spec['kind']} is not defined for {mixer['kind']}: {reason}"
        assert str(caught.value) == expected


def test_every_pair_is_one_or_the_other() -> None:
    """The lists of defined and undefined pairs are complete."""
    pairs = [(spec["kind"], mixer["kind"]) for spec, mixer in (*DEFINED, *UNDEFINED)]
    assert sorted(pairs) == sorted((name, mixer) for name in MITIGATIONS for mixer in MIXERS)
    assert {spec["kind"] for spec, _ in UNDEFINED} >= {"forget_more", "sliding_window"}


def test_only_recurrent_models_can_be_mitigated() -> None:
    """Other models raise."""
    model: Any = Mitigated(build_model(), mitigation("none"))
    with pytest.raises(UserError, match="Mitigated"):
        Mitigated(model, mitigation("forget_more"))
