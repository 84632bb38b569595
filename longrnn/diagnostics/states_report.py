"""Writes the report of a diagnosis of states: a summary, pictures and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longrnn.diagnostics.collapse import MARGIN, STATISTICS
from longrnn.diagnostics.layer_statistics import GLOBAL
from longrnn.diagnostics.states import Diagnosis
from longrnn.evaluation.figures import lengths_axis, new_figure, png
from longrnn.evaluation.report import Picture, write_page
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Maximum number of heads in a sentence, and of layers in a legend.
NAMED = 6
# Colours of the heads that grow most.
COLOURS = ("tab:red", "tab:orange", "tab:purple", "tab:brown")
# Labels of the vertical axes.
LABELS = {
    "loss": "loss\n(nats per token)",
    "norm": "norm of the state /\nlargest inside",
    "retention": "share of the\ninitial state left",
    "deviation": "standard deviation /\nlargest inside",
    "mean": "mean / largest\nr.m.s. inside",
    "gate": "1 − decay\nper token",
    "first_share": "first tokens /\nwhole state",
    "output_norm": "norm of the\nlayer's output",
}
# Statistics without heads.
PER_LAYER = ("loss", "output_norm")
# The pictures: name, statistics from top to bottom, caption.
DRAWN = (
    (
        "overview",
        ("loss", "norm", "retention"),
        "By tokens read: the loss; the norm of each head's state over its largest value inside the "
        "training length (above the dashed line a head is outside its range); the share of the "
        "initial state that is left (above the dashed line at the training length a head is "
        "global). Thick lines are the heads that grow most. Collapse is found from states alone: "
        "the loss can stay or fall while a head collapses, because later layers may use little of "
        "its output, and an output norm removes growth that the heads of a layer share.",
    ),
    (
        "statistics",
        ("deviation", "mean", "gate", "first_share", "output_norm"),
        "By tokens read: standard deviation and mean of the state's entries; the share that "
        "is forgotten per token; the norm of what is left of the first tokens over that of the "
        "whole state; the norm of the layer's output.",
    ),
)
UNDEFINED = (
    "Retention, decay and the share of the first tokens are not defined here: the state is not a "
    "weighted sum over tokens in an Elman cell, nor under a mitigation that redefines the "
    "recurrence."
)


def write_report(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Writes the pictures and `report.html`, and returns the files, the report first."""
    pictures = [
        Picture(name, caption, _by_position(diagnosis, statistics))
        for name, statistics, caption in DRAWN
    ]
    pictures.append(_channels(diagnosis))
    values = {
        "about": diagnosis.about,
        "summary": summary(diagnosis),
        "findings": diagnosis.findings,
        "collapsing": diagnosis.collapsing(),
        "globals": diagnosis.global_heads(),
        "prompts": diagnosis.prompts,
        "length": format_length,
        "undefined": None if diagnosis.retention_is_defined() else UNDEFINED,
    }
    return write_page("states.html", folder, pictures, values)


def summary(diagnosis: Diagnosis) -> str:
    """Names the heads that collapse and those that are global, in two sentences."""
    total = len({(one.layer, one.head) for one in diagnosis.findings})
    trained = format_length(diagnosis.about["train_length"])
    collapsing, global_heads = diagnosis.collapsing(), diagnosis.global_heads()
    if collapsing:
        first = min(one.onset for one in diagnosis.findings if one.onset is not None)
        collapse = (
            f"{len(collapsing)} of {total} heads collapse beyond the training length of {trained} "
            f"tokens, the first from position {first:,} on (the state that grows most first): "
            f"{_names(collapsing)}."
        )
    else:
        length = format_length(diagnosis.about["length"])
        collapse = (
            f"None of {total} heads collapses between the training length of {trained} and "
            f"{length} tokens."
        )
    kept = f"more than {GLOBAL:.0%} of a state over the training length"
    if not diagnosis.retention_is_defined():
        return f"{collapse} Which heads are global is not known: retention is not defined here."
    if not global_heads:
        return f"{collapse} No head keeps {kept}."
    return f"{collapse} {len(global_heads)} of {total} keep {kept}: {_names(global_heads)}."


def _names(heads: Sequence[tuple[int, int]]) -> str:
    named = ", ".join(f"layer {layer} head {head}" for layer, head in heads[:NAMED])
    return named if len(heads) <= NAMED else f"{named} and {len(heads) - NAMED} more"


def _by_position(diagnosis: Diagnosis, statistics: Sequence[str]) -> bytes:
    """Draws one row of panels per statistic and one column per prompt, one line per head."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    lines = {name: _lines(diagnosis, name) for name in statistics}
    lines = {name: table for name, table in lines.items() if not table.isnan().all()}
    prompts = diagnosis.prompts
    figure = new_figure(max(7.0, 4.2 * len(prompts)), 2.0 * len(lines) + 0.9)
    panels = figure.subplots(len(lines), len(prompts), squeeze=False, sharey="row")
    n_layers = diagnosis.values["norm"].shape[1]
    colours = [colormaps["viridis"](0.9 * k / max(1, n_layers - 1)) for k in range(n_layers)]
    worst = dict(zip(diagnosis.collapsing(), COLOURS, strict=False))
    for row, (name, table) in enumerate(lines.items()):
        for column, panel in enumerate(panels[row]):
            for layer in range(table.shape[1]):
                for head in range(table.shape[3]):
                    own = None if name in PER_LAYER else worst.get((layer, head))
                    style = {"color": own, "lw": 1.8, "zorder": 3} if own else {"lw": 0.8}
                    colour = "black" if name == "loss" else colours[layer]
                    line = table[:, layer, column, head].tolist()
                    panel.plot(diagnosis.positions, line, **{"color": colour, **style})
            _scale(panel, name, diagnosis)
        panels[row, 0].set_ylabel(LABELS[name], fontsize=9)
    for panel, prompt in zip(panels[0], prompts, strict=True):
        panel.set_title(prompt.name, fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("tokens read (dotted: the training length)", fontsize=9)
    figure.align_ylabels(list(panels[:, 0]))
    legend = {f"layer {layer} head {head}": colour for (layer, head), colour in worst.items()}
    step = max(1, -(-n_layers // NAMED))
    others = " (others)" if worst else ""
    legend |= {f"layer {k}{others}": colours[k] for k in range(0, n_layers, step)}
    handles = [Line2D([], [], color=colour, label=name) for name, colour in legend.items()]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=5, frameon=False)
    return png(figure)


def _lines(diagnosis: Diagnosis, name: str) -> Tensor:
    """Returns the values of a statistic to draw, `(positions, layers, prompts, heads)`."""
    values = diagnosis.values
    if name == "loss":
        return values["loss"][:, None, :, None]
    if name == "output_norm":
        return values[name][..., :1]
    if name == "gate":
        return 1 - values[name]
    if name not in STATISTICS:
        return values[name]
    inside = torch.tensor(diagnosis.positions) <= diagnosis.about["train_length"]
    sizes = values[name]
    if name == "mean":
        sizes = (values["deviation"].square() + values["mean"].square()).sqrt()
    return values[name] / sizes[inside].amax(0)


def _scale(panel: Axes, name: str, diagnosis: Diagnosis) -> None:
    panel.axvline(diagnosis.about["train_length"], color="black", linestyle=":", lw=1.2)
    lengths_axis(panel, diagnosis.about["length"], least=diagnosis.positions[0])
    if name in ("norm", "deviation", "gate"):
        panel.set_yscale("log")
    if name in ("norm", "deviation"):
        panel.axhline(1 + MARGIN, color="tab:red", linestyle="--", lw=1)
    if name == "retention":
        panel.axhline(GLOBAL, color="gray", linestyle="--", lw=1)
    if name == "retention":
        panel.set_ylim(-0.02, 1.05)
    if name in PER_LAYER:
        panel.set_ylim(bottom=0)


def _channels(diagnosis: Diagnosis) -> Picture:
    """Draws the channels of the heads that grow most, on the first prompt."""
    norms = diagnosis.values["norm"][-1, :, 0]
    largest = divmod(int(norms.nan_to_num(torch.inf).argmax()), norms.shape[1])
    heads = diagnosis.collapsing()[:3] or [largest]
    figure = new_figure(max(5.0, 3.4 * len(heads)), 3.0)
    panels = figure.subplots(1, len(heads), squeeze=False)[0]
    ends = ("at the training length", "0.5"), ("at the end", "tab:red")
    for panel, (layer, head) in zip(panels, heads, strict=True):
        for (label, colour), sizes in zip(ends, diagnosis.channels[:, layer, 0, head], strict=True):
            panel.plot(sizes.tolist(), "o", ms=3, color=colour, label=label)
        panel.set_yscale("log")
        panel.set_title(f"layer {layer} head {head}", fontsize=10)
        panel.set_xlabel("channel", fontsize=9)
    panels[0].set_ylabel("root mean square\nof the state", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    name = diagnosis.prompts[0].name
    caption = (
        f"Size of each channel on {name}: of the heads that grow most, or of the largest state. "
        "Outlier channels stand far above the others at the end (arXiv 2410.07145). A channel is a "
        "row of the state of Mamba-2, or a unit of RNN, GRU and LSTM."
    )
    return Picture("channels", caption, png(figure))
