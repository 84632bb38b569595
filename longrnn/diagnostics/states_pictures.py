"""Pictures of states by position, one line per head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longrnn.diagnostics.collapse import GLOBAL, MARGIN, STATISTICS
from longrnn.diagnostics.states import Diagnosis
from longrnn.diagnostics.states_summary import worst_heads
from longrnn.evaluation.figures import lengths_axis, new_figure, png
from longrnn.evaluation.report import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

# Maximum number of layers in a legend.
NAMED = 8
# Colours of the heads that grow most.
COLOURS = ("tab:red", "tab:orange", "tab:purple", "tab:brown")
# The label of the vertical axis, and the caption.
DRAWN = {
    "norm": (
        "norm of the state /\nlargest inside",
        "Norm of the state over its largest value inside the training length. Above the dashed "
        "line a head is outside its range.",
    ),
    "deviation": (
        "standard deviation /\nlargest inside",
        "Standard deviation of the state's entries over its largest value inside.",
    ),
    "mean": (
        "mean /\nlargest root mean square inside",
        "Mean of the state's entries over the largest root mean square inside. Bounds differ from "
        "head to head and are not drawn.",
    ),
    "retention": (
        "share of the initial state",
        "Share of the initial state that is retained: exp(Σ log decay). Above the dashed line at "
        "the training length a head is global.",
    ),
    "first_share": (
        "first tokens / whole state",
        "Norm of the remaining contribution of the first tokens over that of the state.",
    ),
    "channels_90": (
        "channels with 90 % of the\nenergy of the state",
        "How concentrated the state is: the smallest number of channels of a head (rows of its "
        "state in Mamba-2, units in RNN, GRU and LSTM) that hold 90 % of the sum of its squares.",
    ),
    "output_share": (
        "share of the layer's output",
        "Share of the head in the energy of its layer's output, behind the output norm if there is "
        "one: mean over the tokens since the last measurement.",
    ),
    "output_norm": (
        "norm of the layer's output",
        "Norm of the mixer's output, by layer: mean over the tokens since the last measurement.",
    ),
}


def by_position(diagnosis: Diagnosis) -> list[Picture]:
    """Return one picture for each statistic that is defined."""
    return [_picture(diagnosis, name) for name in DRAWN if _is_defined(diagnosis, name)]


def _is_defined(diagnosis: Diagnosis, name: str) -> bool:
    if name == "output_share" and diagnosis.curves.values[name].shape[-1] == 1:
        return False  # the only head has all of it
    return diagnosis.retention_is_defined() or name not in ("retention", "first_share")


def _picture(diagnosis: Diagnosis, name: str) -> Picture:
    """Plot a statistic, one panel per prompt and one line per head.

    The heads that grow most have the colours of the overview, all others that of their layer.
    """
    from matplotlib import colormaps

    curves = diagnosis.curves
    lines = lines_of(diagnosis, name)  # positions, layers, prompts, heads
    n_layers, n_prompts = lines.shape[1:3]
    palette = colormaps["viridis"]
    colours = [palette(0.9 * layer / max(1, n_layers - 1)) for layer in range(n_layers)]
    named = {round(i * (n_layers - 1) / max(1, NAMED - 1)) for i in range(NAMED)}
    worst = dict(zip(worst_heads(diagnosis), COLOURS, strict=False)) if name in _PER_HEAD else {}
    figure = new_figure(4.6 * n_prompts + 0.6, 3.6)
    panels = figure.subplots(1, n_prompts, squeeze=False, sharey=True)[0]
    for row, (panel, prompt) in enumerate(zip(panels, diagnosis.prompts, strict=True)):
        for layer in range(n_layers):
            for head in range(lines.shape[3]):
                line = lines[:, layer, row, head].tolist()
                style = {"color": colours[layer], "lw": 0.8}
                if (layer, head) in worst:  # above the others
                    style = {"color": worst[layer, head], "lw": 1.8, "zorder": 3}
                panel.plot(curves.positions, line, **style)
        panel.axvline(diagnosis.about["train_length"], color="gray", linestyle=":", linewidth=1.2)
        lengths_axis(panel, diagnosis.about["length"], least=curves.positions[0])
        panel.set(title=prompt.name, xlabel="tokens read")
    for panel in panels:  # which share an axis: its limits are those of all lines
        _scale(panel, name)
    label, caption = DRAWN[name]
    panels[0].set_ylabel(label)
    shown = {f"layer {layer} head {head}": colour for (layer, head), colour in worst.items()}
    others = " (other heads)" if worst else ""
    shown |= {f"layer {layer}{others}": colours[layer] for layer in sorted(named)}
    _legend(figure, shown)
    return Picture(name, caption, png(figure))


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
    if name in ("norm", "deviation"):
        panel.set_yscale("log")
        panel.axhline(1 + MARGIN, color="tab:red", linestyle="--", linewidth=1)
    if name == "output_norm":
        panel.set_ylim(bottom=0)
    if name == "retention":
        panel.axhline(GLOBAL, color="gray", linestyle="--", linewidth=1)
        panel.set_ylim(-0.02, 1.05)


def _legend(figure: Figure, colours: Mapping[str, ColorType]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, fontsize=7, loc="outside right center", frameon=False)
