"""Writes the report of a gradient diagnosis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from longrnn.diagnostics.curves import curves
from longrnn.diagnostics.gradients import BINS, GradientRecord, Row
from longrnn.evaluation.figures import new_figure, png
from longrnn.evaluation.report import Picture, write_page

# A factor per token this near to 1 is called neither vanishing nor exploding.
STEADY = 0.01

CAPTIONS = {
    "norms": "Norm of the loss's gradient in the state, by distance in tokens: geometric mean over "
    "sequences. A straight line is a constant factor per token; a falling one vanishes.",
    "weights": "Entries of the gradient of the recurrent weights, of the loss at the last token, "
    "by their size, for each sequence length.",
    "jacobian": "Spectral radius of the step Jacobian along one sequence.",
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
    rows = record.of("norms", part="state")
    drawn = {
        _label(row, rows): [(k, norm) for k, norm in enumerate(row["norm"], start=1) if norm > 0]
        for row in rows
    }
    return curves(drawn, across="distance T − k (tokens)", up="norm of ∂loss_T/∂h_k", log=True)


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
    keys = record.of("norms", part="state")
    drawn = {}
    for key in keys:
        rows = record.of("jacobian", subject=key["subject"], layer=key["layer"])
        drawn[_label(key, keys)] = [(row["position"], row["radius"]) for row in rows]
    return curves(drawn, across="token", up="spectral radius", level=1)


def _lyapunov(record: GradientRecord) -> bytes:
    rows = record.of("lyapunov")
    drawn = {
        _label(row, rows): [(k, e) for k, e in enumerate(row["exponents"], 1) if math.isfinite(e)]
        for row in rows
    }
    return curves(drawn, across="exponent, the largest first", up="nats per token", level=0)


def _label(row: Row, rows: Sequence[Row]) -> str:
    deep = any(other["layer"] for other in rows)
    return f"{row['subject']}, layer {row['layer']}" if deep else row["subject"]
