"""Writes the report of a gradient diagnosis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longrnn.diagnostics.gradients import BINS, GradientRecord, Row
from longrnn.evaluation.figures import new_figure, png
from longrnn.evaluation.report import Picture, write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Maximum number of lines in a legend.
NAMED = 12
# A factor per token this near to 1 is called neither vanishing nor exploding.
STEADY = 0.01
# A ratio of the largest to the smallest Lyapunov exponent above this gets a logarithmic axis.
WIDE = 10

CAPTIONS = {
    "norms": "Norm of the loss's gradient in the state, by distance in tokens: geometric mean over "
    "sequences. A straight line is a constant factor per token; a falling one vanishes.",
    "weights": "Entries of the gradient of the recurrent weights, of the loss at the last token, "
    "by their size, for each sequence length.",
    "jacobian": "Spectral radius of the step Jacobian along one sequence, and its largest singular "
    "value: above 1 a step can stretch.",
    "lyapunov": "Lyapunov exponents of the product of the steps, in nats per token: at 0 a "
    "direction is kept, below it is forgotten.",
}


def write_report(record: GradientRecord, folder: Path) -> list[Path]:
    """Writes the pictures and `report.html`, and returns the files, the report first."""
    drawings = {"norms": _norms, "weights": _weights, "jacobian": _jacobian, "lyapunov": _lyapunov}
    pictures = [
        Picture(name, CAPTIONS[name], draw(record))
        for name, draw in drawings.items()
        if record.of(name)
    ]
    values = {
        "about": record.about,
        "summary": summary(record),
        "layers": layers(record),
        "losses": record.of("loss"),
        "weights": record.of("weights"),
        "nonfinite": record.of("nonfinite"),
    }
    return write_page("gradients.html", folder, pictures, values)


def layers(record: GradientRecord) -> list[Row]:
    """Return one row per model and layer: slope, factor and half-life, spectra, first exponent."""
    found = []
    for norms in record.of("norms", part="state"):
        key = {"subject": norms["subject"], "layer": norms["layer"]}
        spectra = record.of("jacobian", **key)
        (exponents,) = record.of("lyapunov", **key)
        slope = None if norms["slope"] is None else norms["slope"]["mean"]
        radii = [row["radius"] for row in spectra]
        found.append(
            {
                **key,
                "slope": slope,
                "factor": None if slope is None else math.exp(min(slope, 700)),
                "half_life": -math.log(2) / slope if slope is not None and slope < 0 else None,
                "radius": sum(radii) / len(radii),
                "singular": max(row["singular"] for row in spectra),
                "exponent": exponents["exponents"][0],
                "method": spectra[0]["method"],
            }
        )
    return found


def summary(record: GradientRecord) -> str:
    """Describe the findings, one sentence per model."""
    sentences = [
        f"{row['subject']}: {row['where']} (length {row['length']})."
        for row in record.of("nonfinite")
    ]
    rows = layers(record)
    for name in dict.fromkeys(row["subject"] for row in rows):
        of_layers = [row for row in rows if row["subject"] == name]
        known = [row for row in of_layers if row["factor"] is not None]
        if not known:
            sentences.append(f"{name}: the gradient is exactly 0 far from the loss.")
            continue
        row = max(known, key=lambda row: row["factor"])
        where = f" (layer {row['layer']}, the slowest)" if len(of_layers) > 1 else ""
        sentences.append(f"{name}: the gradient {_manner(row)}{where}.")
    return " ".join(sentences)


def _manner(row: Row) -> str:
    factor = f"× {row['factor']:.4g} per token"
    if row["factor"] > 1 + STEADY:
        return f"explodes, {factor}"
    if row["factor"] > 1 - STEADY:
        return f"neither vanishes nor explodes, {factor}"
    return f"vanishes, {factor}, halved every {row['half_life']:.3g} tokens"


def _norms(record: GradientRecord) -> bytes:
    figure = new_figure(8.0, 4.2)
    panel = figure.subplots()
    rows = record.of("norms", part="state")
    for row in rows:
        points = [(k, norm) for k, norm in enumerate(row["norm"], start=1) if norm > 0]
        if points:
            panel.plot(*zip(*points, strict=True), lw=1.3, label=_label(row, rows))
    panel.set_yscale("log")
    panel.set(xlabel="distance T − k (tokens)", ylabel="norm of ∂loss_T/∂h_k")
    _legend(panel)
    return png(figure)


def _weights(record: GradientRecord) -> bytes:
    """Plot histograms, one panel per model, all layers together."""
    from matplotlib.ticker import MultipleLocator

    names = list(dict.fromkeys(row["subject"] for row in record.of("weights")))
    columns, lines = min(2, len(names)), -(-len(names) // 2)
    figure = new_figure(4.2 * columns + 0.6, 2.8 * lines + 0.4)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in grid.flat[len(names) :]:
        panel.remove()
    for panel, name in zip(grid.flat, names, strict=False):
        for length in record.about["lengths"]:
            rows = record.of("weights", subject=name, length=length)
            if rows:
                counts = [sum(column) for column in zip(*(r["counts"] for r in rows), strict=True)]
                total = sum(counts) + sum(row["zeros"] for row in rows)
                shares = [count / total for count in counts]
                panel.stairs(shares, BINS, label=f"length {length}", lw=1.2)
        panel.set(title=name, xlabel="log₁₀ |gradient|")
        panel.xaxis.set_major_locator(MultipleLocator(4))
        panel.legend(fontsize=8)
    figure.supylabel("share of entries", fontsize=10)
    return png(figure)


def _jacobian(record: GradientRecord) -> bytes:
    figure = new_figure(9.0, 4.2)
    panels = figure.subplots(1, 2)
    keys = record.of("norms", part="state")
    for key in keys:
        rows = record.of("jacobian", subject=key["subject"], layer=key["layer"])
        positions = [row["position"] for row in rows]
        label = _label(key, keys)
        panels[0].plot(positions, [row["radius"] for row in rows], lw=1.2, label=label)
        panels[1].plot(positions, [row["singular"] for row in rows], lw=1.2, label=label)
    for panel, name in zip(panels, ("spectral radius", "largest singular value"), strict=True):
        panel.axhline(1, color="gray", linestyle=":", linewidth=1.2)
        panel.set(xlabel="token", ylabel=name)
        panel.ticklabel_format(useOffset=False)
    handles, labels = panels[0].get_legend_handles_labels()
    if len(handles) <= NAMED:
        figure.legend(
            handles, labels, fontsize=8, loc="outside lower center", ncols=3, frameon=False
        )
    return png(figure)


def _lyapunov(record: GradientRecord) -> bytes:
    figure = new_figure(6.4, 3.4)
    panel = figure.subplots()
    rows = record.of("lyapunov")
    for row in rows:
        finite = [e for e in row["exponents"] if math.isfinite(e)]
        panel.plot(range(1, len(finite) + 1), finite, marker="o", ms=4, label=_label(row, rows))
    sizes = [abs(e) for row in rows for e in row["exponents"] if math.isfinite(e) and e]
    if sizes and max(sizes) > WIDE * min(sizes):
        # A linear axis would draw the exponents near 0 on the line of 0.
        panel.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(sizes))))
    panel.axhline(0, color="gray", linestyle=":", linewidth=1.2)
    panel.set(xlabel="exponent, the largest first", ylabel="nats per token")
    _legend(panel)
    return png(figure)


def _label(row: Row, rows: Sequence[Row]) -> str:
    deep = any(other["layer"] for other in rows)
    return f"{row['subject']}, layer {row['layer']}" if deep else row["subject"]


def _legend(panel: Axes) -> None:
    handles, _ = panel.get_legend_handles_labels()
    if 0 < len(handles) <= NAMED:
        panel.legend(fontsize=7)
