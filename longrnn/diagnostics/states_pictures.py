"""Pictures of states by position, one line per head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longrnn.diagnostics.collapse import GLOBAL, MARGIN, STATISTICS
from longrnn.diagnostics.pages import Picture
from longrnn.diagnostics.plots import lengths_axis, new_figure, png
from longrnn.diagnostics.states import Diagnosis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

# Maximum number of layers in a legend.
NAMED = 8
CAPTIONS = {
    "norm": "Norm of the state over its largest value inside the training length. Above the dashed "
    "line a head is outside its range; heads that collapse are red.",
    "deviation": "Standard deviation of the state's entries over its largest value inside.",
    "mean": "Mean of the state's entries over the largest root mean square inside. Bounds differ "
    "from head to head and are not drawn.",
    "retention": "Share of the initial state that is retained: exp(Σ log decay). Above the dashed "
    "line at the training length a head is global.",
    "first_share": "Norm of the remaining contribution of the first tokens over that of the state.",
    "channels_90": "Number of channels that hold 90 % of the energy of a head's state.",
    "output_share": "Share of the head in the energy of its layer's output, behind the output norm "
    "if there is one: mean over the tokens since the last measurement.",
    "output_norm": "Norm of the mixer's output, by layer: mean over the tokens since the last "
    "measurement.",
}


def by_position(diagnosis: Diagnosis) -> list[Picture]:
    """Return one picture for each statistic that is defined."""
    return [_picture(diagnosis, name) for name in CAPTIONS if _is_defined(diagnosis, name)]


def _is_defined(diagnosis: Diagnosis, name: str) -> bool:
    if name == "output_share" and diagnosis.curves.values[name].shape[-1] == 1:
        return False  # the only head has all of it
    return diagnosis.retention_is_defined() or name not in ("retention", "first_share")


def _picture(diagnosis: Diagnosis, name: str) -> Picture:
    """Plot a statistic, one panel per prompt and one line per head, coloured by layer."""
    from matplotlib import colormaps

    curves = diagnosis.curves
    lines = lines_of(diagnosis, name)  # positions, layers, prompts, heads
    n_layers, n_prompts = lines.shape[1:3]
    palette = colormaps["viridis"]
    colours = [palette(0.9 * layer / max(1, n_layers - 1)) for layer in range(n_layers)]
    named = {round(i * (n_layers - 1) / max(1, NAMED - 1)) for i in range(NAMED)}
    collapsing = {
        (f.layer, f.head, f.prompt) for f in diagnosis.findings if f.left and name in _PER_HEAD
    }
    figure = new_figure(4.6 * n_prompts + 0.6, 3.6)
    panels = figure.subplots(1, n_prompts, squeeze=False, sharey=True)[0]
    for row, (panel, prompt) in enumerate(zip(panels, diagnosis.prompts, strict=True)):
        for layer in range(n_layers):
            for head in range(lines.shape[3]):
                ill = (layer, head, prompt.name) in collapsing
                style = {"color": "tab:red" if ill else colours[layer], "lw": 1.8 if ill else 1.0}
                line = lines[:, layer, row, head].tolist()
                label = f"layer {layer}" if head == 0 and layer in named else None
                panel.plot(curves.positions, line, alpha=0.9, **style, label=label)
                if ill:
                    panel.annotate(f"L{layer}H{head}", (curves.positions[-1], line[-1]), fontsize=7)
        panel.axvline(diagnosis.about["train_length"], color="gray", linestyle=":", linewidth=1.2)
        lengths_axis(panel, diagnosis.about["length"], least=curves.positions[0])
        panel.set(title=prompt.name, xlabel="tokens read")
        _scale(panel, name)
    panels[0].set_ylabel(name.replace("_", " "))
    _legend(panels[0], colours, sorted(named))
    return Picture(name, CAPTIONS[name], png(figure))


_PER_HEAD = (*STATISTICS, "retention", "first_share", "channels_90", "output_share")


def lines_of(diagnosis: Diagnosis, name: str) -> Tensor:
    """Return the values to plot of a statistic, `(positions, layers, prompts, heads)`."""
    values = diagnosis.curves.values
    if name == "output_norm":
        return values[name][..., None]
    if name not in STATISTICS:
        return values[name]
    inside = torch.tensor(diagnosis.curves.positions) <= diagnosis.about["train_length"]
    sizes = {
        "norm": values["norm"],
        "deviation": values["variance"].sqrt(),
        "mean": (values["variance"] + values["mean"].square()).sqrt(),
    }
    drawn = values["mean"] if name == "mean" else sizes[name]
    return drawn / sizes[name][inside].amax(0)


def _scale(panel: Axes, name: str) -> None:
    if name in ("norm", "deviation", "output_norm"):
        panel.set_yscale("log")
    if name in ("norm", "deviation"):
        panel.axhline(1 + MARGIN, color="tab:red", linestyle="--", linewidth=1)
    if name == "retention":
        panel.axhline(GLOBAL, color="gray", linestyle="--", linewidth=1)
        panel.set_ylim(-0.02, 1.05)


def _legend(panel: Axes, colours: Sequence[ColorType], layers: Sequence[int]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colours[layer], label=f"layer {layer}") for layer in layers]
    panel.legend(handles=handles, fontsize=7)
