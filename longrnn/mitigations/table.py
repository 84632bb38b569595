"""The table of mitigations and the cells for which they are defined."""

from __future__ import annotations

from longrnn.mitigations.base import MITIGATIONS
from longrnn.mixers import MIXERS


def support_table() -> str:
    """A Markdown table of mitigations × cells, followed by the reasons for undefined pairs."""
    lines = [
        "| | " + " | ".join(MIXERS) + " |",
        "| --- " * (len(MIXERS) + 1) + "|",
    ]
    notes: list[str] = []
    for name, member in MITIGATIONS.items():
        cells = []
        for mixer in MIXERS.values():
            reason = member.undefined(mixer)
            if reason is not None and reason not in notes:
                notes.append(reason)
            cells.append("yes" if reason is None else f"no ({notes.index(reason) + 1})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]
    return "\n".join(lines)
