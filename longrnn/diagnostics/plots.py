"""Pictures of results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from longrnn.evaluation import passkey
from longrnn.evaluation.results import Row
from longrnn.files import write_atomic
from longrnn.units import format_length


def passkey_heat_map(rows: Sequence[Row], path: Path) -> None:
    """Accuracy by length (across) and depth (down), one panel per model.

    Args:
        rows: of `evaluation.passkey.evaluate`.
        path: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = passkey.by_model(rows)
    width = max(len({row["length"] for row in one}) for one in runs.values())
    figure = Figure(figsize=(len(runs) * (0.8 * width + 1.2) + 1, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    image = None
    for panel, (name, one) in zip(panels, runs.items(), strict=True):
        cells = passkey.summarise(one)
        lengths = sorted({length for length, _ in cells})
        depths = sorted({depth for _, depth in cells if depth is not None})
        grid = [[cells[length, depth].mean for length in lengths] for depth in depths]
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for down, line in enumerate(grid):
            for across, value in enumerate(line):
                panel.text(across, down, f"{value:.2f}", ha="center", va="center", fontsize=9)
        panel.set_xticks(range(len(lengths)), [format_length(length) for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        panel.set(title=name, xlabel="prompt length (tokens)", ylabel="depth of the key")
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="keys recalled")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomic(path, buffer.getvalue())
