"""Writes the plot and the record of capacities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longrnn.diagnostics.plots import lengths_axis, new_figure, png
from longrnn.files import write_atomic
from longrnn.studies.capacity import Bounded, Member, Size
from longrnn.studies.capacity_fits import FORMS, Fit

MARKERS = {"": "o", "≤": "v", "≥": "^", ">": "^"}
LINES = {"line": "-", "power": "--", "exponential": "-"}
TITLES = {
    "forget": "T_forget: training length from which on\na model forgets robustly",
    "recall": "T_recall: longest prompt\nwith more than 95 % recalled",
}


def write(
    members: Sequence[Member],
    found: Sequence[Size],
    fits: Mapping[str, Sequence[Fit | str]],
    folder: Path,
) -> list[Path]:
    """Write `capacity.jsonl`, one row per model, point and fit, and `capacity.png`."""
    rows: list[dict[str, Any]] = [{"evaluation": "capacity"}]
    rows += [{"row": "model", **one._asdict()} for one in members]
    rows += [
        {
            "row": "size",
            "state_size": size.state_size,
            "seed": size.seed,
            "forget": _bounded(size.forget),
            "recall": _bounded(size.recall),
        }
        for size in found
    ]
    for name, fitted in ((name, one) for name, all_ in fits.items() for one in all_):
        about = {"no_fit": fitted} if isinstance(fitted, str) else fitted._asdict()
        rows.append({"row": "fit", "of": name, **about})
    write_atomic(folder / "capacity.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_atomic(folder / "capacity.png", _picture(found, fits))
    return [folder / "capacity.jsonl", folder / "capacity.png"]


def _bounded(point: Bounded | None) -> dict[str, Any] | None:
    return None if point is None else point._asdict()


def _picture(found: Sequence[Size], fits: Mapping[str, Sequence[Fit | str]]) -> bytes:
    # A length without results has no panel.
    drawn = [name for name in TITLES if any(getattr(size, name) for size in found)] or list(TITLES)
    figure = new_figure(4.8 * len(drawn), 4.0)
    panels = figure.subplots(1, len(drawn), squeeze=False)[0]
    for panel, name in zip(panels, drawn, strict=True):
        points = [(size.state_size, getattr(size, name)) for size in found]
        for state_size, point in points:
            if point is not None:
                filled = "tab:blue" if not point.bound else "none"
                marker = MARKERS[point.bound]
                panel.scatter(state_size, point.value, marker=marker, c=filled, ec="tab:blue", s=50)
        all_sizes = sorted({state_size for state_size, _ in points})
        low, high = all_sizes[0], all_sizes[-1]
        for fitted in fits[name]:
            if isinstance(fitted, Fit):
                across = [low * (high / low) ** (k / 100) for k in range(101)]
                line, label = LINES[fitted.form], FORMS[fitted.form]
                curve = [fitted.at(n) for n in across]
                panel.plot(across, curve, line, color="tab:red", lw=1.2, label=label)
                panel.legend(fontsize=8)
        lengths_axis(panel, high, least=low, measured=all_sizes)
        panel.set_xlim(low / 1.3, high * 1.3)
        panel.set(
            xlabel="entries of the state", ylabel="tokens", title=TITLES[name], ylim=(0, None)
        )
    figure.supxlabel("filled: measured; hollow: a bound, not used in the fit", fontsize=8)
    return png(figure)
