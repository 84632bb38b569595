"""The documented table of mitigations and cells equals the code, and undefined pairs raise."""

import re
from pathlib import Path

import pytest

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.mitigations import MITIGATIONS, mitigation
from tests.contracts.builders import UNDEFINED, Spec, build_model, spec_id

DOCUMENT = Path(__file__).parents[2] / "docs/repair.md"
ONLY_HYBRIDS = {
    family.cell.__name__: family.cell
    for _, family in sorted(FAMILIES.items())
    if not issubclass(family.cell, tuple(MIXERS.values()))
}


def support_table() -> str:
    """A Markdown table of the pairs of mitigations and cells that are not defined, by reason."""
    cells = {**dict(MIXERS.items()), **ONLY_HYBRIDS}
    # Mitigations that lack the same cells for the same reason share a row.
    rows: dict[tuple[str, str], list[str]] = {}
    for name, member in MITIGATIONS.items():
        reasons = {cell: member.undefined(kind) for cell, kind in cells.items()}
        for reason in dict.fromkeys(filter(None, reasons.values())):
            lacking = ", ".join(cell for cell, found in reasons.items() if found == reason)
            rows.setdefault((lacking, reason), []).append(f"`{name}`")
    lines = ["| mitigation | cells | because |", "| --- | --- | --- |"]
    for (lacking, reason), names in rows.items():
        lines.append(f"| {', '.join(names)} | {lacking} | {reason.partition('; use')[0]} |")
    return "\n".join(lines)


def test_the_document_contains_the_table() -> None:
    found = re.findall(
        r"^<!-- table -->\n(.*?)\n<!-- /table -->$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found == [support_table()]


@pytest.mark.parametrize(("spec", "mixer"), UNDEFINED, ids=spec_id)
def test_undefined_pairs_are_refused(spec: Spec, mixer: Spec) -> None:
    """The error gives the reason, alone and in a chain."""
    reason = MITIGATIONS[spec["kind"]].undefined(MIXERS[mixer["kind"]])
    for member in (mitigation(spec), mitigation(["none", spec])):
        with pytest.raises(UserError, match=f"{spec['kind']}.*{mixer['kind']}") as caught:
            build_model(mixer).under(member)
        assert str(reason) in str(caught.value)
