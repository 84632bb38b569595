"""Writes the report of a diagnosis of states: a summary, pictures and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longrnn.diagnostics.collapse import MARGIN, STATISTICS
from longrnn.diagnostics.observe import GLOBAL
from longrnn.diagnostics.states import Diagnosis
from longrnn.evaluation.figures import lengths_axis, new_figure, png
from longrnn.evaluation.report import Picture, write_page
from longrnn.units import format_length

# Maximum number of heads in a sentence, and of layers in a legend.
NAMED = 6
# Colours of the heads that grow most.
COLOURS = ("tab:red", "tab:orange", "tab:purple", "tab:brown")
# What is drawn, from top to bottom, with labels of the vertical axes.
LABELS = {
    "loss": "loss\n(nats per token)",
    "norm": "norm of the state /\nlargest inside",
    "deviation": "standard deviation /\nlargest inside",
    "mean": "mean / largest\nr.m.s. inside",
    "retention": "share of the\ninitial state left",
    "gate": "1 − decay\nper token",
}
OVERVIEW = (
    "By tokens read: the loss; norm, standard deviation and mean of the entries of each head's "
    "state over their largest values inside the training length (above the dashed line a head is "
    "outside its range); the share of the initial state that is left (above the dashed line at the "
    "training length a head is global), and the share that is forgotten per token. Thick lines are "
    "the heads that grow most. Collapse is found from states alone: the loss can stay or fall "
    "while a head collapses, because later layers may use little of its output. What is not drawn "
    "is not defined: the state is not a weighted sum over tokens in an Elman cell, nor under a "
    "mitigation that redefines the recurrence."
)


def write_report(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Writes the pictures and `report.html`, and returns the files, the report first."""
    pictures = [Picture("overview", OVERVIEW, _overview(diagnosis)), _channels(diagnosis)]
    values = {
        "about": diagnosis.about,
        "summary": summary(diagnosis),
        "collapsing": diagnosis.collapsing(),
        "findings": sorted(diagnosis.findings, key=lambda one: (not one.left, -one.growth)),
        "length": format_length,
    }
    return write_page("states.html", folder, pictures, values)


def summary(diagnosis: Diagnosis) -> str:
    """Names the heads that collapse and those that are global, in two sentences."""
    total = len({(one.layer, one.head) for one in diagnosis.findings})
    trained, length = (format_length(diagnosis.about[k]) for k in ("train_length", "length"))
    collapsing, global_heads = diagnosis.collapsing(), diagnosis.global_heads()
    onsets = [one.onset for one in diagnosis.findings if one.onset is not None]
    collapse = (
        f"{len(collapsing)} of {total} heads collapse beyond the training length of {trained} "
        f"tokens, the first from position {min(onsets):,} on (the state that grows most first): "
        f"{_names(collapsing)}."
        if onsets
        else f"None of {total} heads collapses between the training length of {trained} and "
        f"{length} tokens."
    )
    return (
        f"{collapse} {len(global_heads)} of {total} keep more than {GLOBAL:.0%} of a state over "
        f"the training length{': ' * bool(global_heads)}{_names(global_heads)}."
    )


def _names(heads: Sequence[tuple[int, int]]) -> str:
    named = ", ".join(f"layer {layer} head {head}" for layer, head in heads[:NAMED])
    return named if len(heads) <= NAMED else f"{named} and {len(heads) - NAMED} more"


def _overview(diagnosis: Diagnosis) -> bytes:
    """Draws one row of panels per statistic and one column per text, one line per head."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    texts, trained = diagnosis.about["texts"], diagnosis.about["train_length"]
    positions = [one.position for one in diagnosis.seen]
    lines = {name: _lines(diagnosis, name) for name in LABELS}
    lines = {name: values for name, values in lines.items() if not values.isnan().all()}
    figure = new_figure(max(7.0, 4.2 * len(texts)), 2.0 * len(lines) + 0.9)
    panels = figure.subplots(len(lines), len(texts), squeeze=False, sharey="row")
    n_layers = len(diagnosis.seen[0].norm)
    colours = [colormaps["viridis"](0.9 * k / max(1, n_layers - 1)) for k in range(n_layers)]
    worst = dict(zip(diagnosis.collapsing(), COLOURS, strict=False))
    levels = {"norm": 1 + MARGIN, "deviation": 1 + MARGIN, "retention": GLOBAL}
    for row, (name, values) in zip(panels, lines.items(), strict=True):
        for column, panel in enumerate(row):
            for layer, own in enumerate(values[..., column, :].unbind(1)):
                for head, line in enumerate(own.unbind(1)):
                    strong = None if name == "loss" else worst.get((layer, head))
                    colour = "black" if name == "loss" else strong or colours[layer]
                    style = {"lw": 1.8, "zorder": 3} if strong else {"lw": 0.8}
                    panel.plot(positions, line.tolist(), color=colour, **style)
            panel.axvline(trained, color="black", linestyle=":", lw=1.2)
            lengths_axis(panel, positions[-1], least=positions[0])
            if name in levels:
                panel.axhline(levels[name], color="gray", linestyle="--", lw=1)
            if name in ("norm", "deviation", "gate"):
                panel.set_yscale("log")
        row[0].set_ylabel(LABELS[name], fontsize=9)
    for panel, text in zip(panels[0], texts, strict=True):
        panel.set_title(text["name"], fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("tokens read (dotted: the training length)", fontsize=9)
    figure.align_ylabels(list(panels[:, 0]))
    legend = {f"layer {layer} head {head}": colour for (layer, head), colour in worst.items()}
    step = max(1, -(-n_layers // NAMED))
    legend |= {f"layer {layer}": colours[layer] for layer in range(0, n_layers, step)}
    handles = [Line2D([], [], color=colour, label=name) for name, colour in legend.items()]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=5, frameon=False)
    return png(figure)


def _lines(diagnosis: Diagnosis, name: str) -> Tensor:
    """Returns the values of a statistic to draw, `(positions, layers, texts, heads)`."""
    values = diagnosis.values(name)
    if name == "loss":
        return values[:, None, :, None]
    if name == "gate":
        return 1 - values
    if name not in STATISTICS:
        return values
    inside = [one.position <= diagnosis.about["train_length"] for one in diagnosis.seen]
    sizes = values
    if name == "mean":
        sizes = (diagnosis.values("deviation").square() + values.square()).sqrt()
    return values / sizes[torch.tensor(inside)].amax(0)


def _channels(diagnosis: Diagnosis) -> Picture:
    """Draws the channels of the heads that grow most, on the first text."""
    first, last = diagnosis.about["train_length"], diagnosis.seen[-1]
    norms = last.norm[:, 0].nan_to_num(torch.inf)
    heads = diagnosis.collapsing()[:3] or [divmod(int(norms.argmax()), norms.shape[1])]
    figure = new_figure(max(5.0, 3.4 * len(heads)), 3.0)
    panels = figure.subplots(1, len(heads), squeeze=False)[0]
    ends = {"at the training length": ("0.5", first), "at the end": ("tab:red", last.position)}
    for panel, (layer, head) in zip(panels, heads, strict=True):
        for label, (colour, position) in ends.items():
            (seen,) = (one for one in diagnosis.seen if one.position == position)
            sizes = seen.channels[layer, 0, head].tolist()
            panel.plot(sizes, "o", ms=3, color=colour, label=label)
        panel.set(yscale="log", title=f"layer {layer} head {head}", xlabel="channel")
    panels[0].set_ylabel("root mean square\nof the state", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    caption = (
        f"Size of each channel on {diagnosis.about['texts'][0]['name']}: of the heads that grow "
        "most, or of the largest state. Outlier channels stand far above the others at the end "
        "(arXiv 2410.07145). A channel is a row of the state of Mamba-2, or a unit of RNN, GRU and "
        "LSTM."
    )
    return Picture("channels", caption, png(figure))
