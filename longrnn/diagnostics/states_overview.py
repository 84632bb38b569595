"""The picture of a diagnosis of states at a glance: loss, sizes of states, shares of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longrnn.diagnostics.channels import OutputChange, top_share
from longrnn.diagnostics.collapse import MARGIN
from longrnn.diagnostics.states import Diagnosis
from longrnn.diagnostics.states_pictures import COLOURS, lines_of
from longrnn.diagnostics.states_summary import most_changed, worst_heads
from longrnn.evaluation.figures import lengths_axis, new_figure, png
from longrnn.evaluation.report import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Layers whose output is drawn.
LAYERS = 8
# Fraction of the channels whose share of the output is drawn.
TOP = 0.1
CAPTION = (
    "From top to bottom, by tokens read: the loss; the norm of each head's state over its largest "
    "value inside the training length, in colour the heads that grow most (above the dashed line a "
    "head is outside its range); {shares}and the share of each layer's output energy that is in "
    "the largest tenth of its channels, inside and beyond the training length. Collapse is found "
    "from states alone: the loss can stay or fall while a head collapses, because later layers may "
    "use little of its output, and an output norm removes growth that the heads of a layer share. "
    "The output is measured behind the gated norm of Mamba-2, where what some channels gain the "
    "others lose; RNN, GRU and LSTM have no such norm."
)
SHARES = (
    "the share of each head in the output energy of the layer where most of it moves, in red the "
    "heads whose share grows by more than half; "
)


def overview(diagnosis: Diagnosis) -> Picture:
    """Return the picture, with one column per prompt."""
    change = most_changed(diagnosis)
    changes = diagnosis.channels.output_changes()
    several = diagnosis.channels.outlier.shape[2] > 1
    heights = [1.0, 1.3, *([1.2] if several else []), 1.0]
    prompts = diagnosis.prompts
    figure = new_figure(5.4 * len(prompts) + 0.8, 2.3 * sum(heights))
    panels = figure.subplots(
        len(heights), len(prompts), squeeze=False, sharey="row", height_ratios=heights
    )
    worst = worst_heads(diagnosis)
    for row, prompt in enumerate(prompts):
        column = panels[:, row]
        column[0].set_title(prompt.name)
        _draw_loss(column[0], diagnosis, row)
        _draw_sizes(column[1], diagnosis, row, worst)
        if several:
            _draw_shares(column[2], diagnosis, row, change)
        _draw_top_channels(column[-1], diagnosis, row, changes)
        for panel in column[:-1]:
            panel.axvline(diagnosis.about["train_length"], color="black", linestyle=":", lw=1.2)
            lengths_axis(panel, diagnosis.about["length"], least=diagnosis.curves.positions[0])
        column[-2].set_xlabel("tokens read (dotted: the training length)")
    labels = ["loss\n(nats per token)", "norm of the state /\nlargest inside"]
    labels += [f"share of the output\nof layer {change.layer}, by head"] * several
    labels += ["output in the largest\ntenth of channels"]
    for panel, label in zip(panels[:, 0], labels, strict=True):
        panel.set_ylabel(label)
    panels[0, 0].set_ylim(bottom=0)
    panels[-1, 0].set_ylim(0, 1.3)  # room for the legend
    panels[-1, 0].set_yticks([0, 0.5, 1])
    for panel in (panels[1, 0], panels[-1, 0]):
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7, loc="upper left", ncols=2 if panel is panels[-1, 0] else 1)
    figure.align_ylabels(list(panels[:, 0]))
    return Picture("overview", CAPTION.format(shares=SHARES if several else ""), png(figure))


def _draw_loss(panel: Axes, diagnosis: Diagnosis, row: int) -> None:
    losses = diagnosis.curves.values["loss"][:, row].tolist()
    panel.plot(diagnosis.curves.positions, losses, color="black", lw=1.4)


def _draw_sizes(
    panel: Axes, diagnosis: Diagnosis, row: int, worst: Sequence[tuple[int, int]]
) -> None:
    sizes = lines_of(diagnosis, "norm")
    colours = dict(zip(worst, COLOURS, strict=False))
    positions = diagnosis.curves.positions
    for layer in range(sizes.shape[1]):
        for head in range(sizes.shape[3]):
            if (layer, head) not in colours:
                panel.plot(positions, sizes[:, layer, row, head], color="0.75", lw=0.8)
    for (layer, head), colour in colours.items():
        line = sizes[:, layer, row, head].tolist()
        panel.plot(positions, line, color=colour, lw=1.8, label=f"layer {layer} head {head}")
    panel.axhline(1 + MARGIN, color="tab:red", linestyle="--", lw=1)
    panel.set_yscale("log")


def _draw_shares(panel: Axes, diagnosis: Diagnosis, row: int, change: OutputChange) -> None:
    from matplotlib import colormaps

    shares = diagnosis.curves.values["output_share"][:, change.layer, row].nan_to_num(0.0)
    others = [head for head in range(shares.shape[1]) if head not in change.gaining]
    order = [*change.gaining, *others]
    reds, greys = colormaps["Reds"], colormaps["Greys"]
    colours = [reds(0.6 - 0.35 * k / len(change.gaining)) for k in range(len(change.gaining))]
    colours += [greys(0.2 + 0.25 * k / max(1, len(others))) for k in range(len(others))]
    positions = diagnosis.curves.positions
    stacked = shares[:, order]
    panel.stackplot(positions, *stacked.T.tolist(), colors=colours, edgecolor="white", lw=0.3)
    middles = stacked[-1].cumsum(0) - stacked[-1] / 2
    for head, middle, share in zip(order, middles.tolist(), stacked[-1].tolist(), strict=True):
        if share > 0.06:
            panel.annotate(
                f"head {head}", (positions[-1], middle), (-4, 0), fontsize=7,
                textcoords="offset points", ha="right", va="center",
            )  # fmt: skip
    panel.set_ylim(0, 1)


def _draw_top_channels(
    panel: Axes, diagnosis: Diagnosis, row: int, changes: Sequence[OutputChange]
) -> None:
    """Draw two bars per layer, for at most LAYERS layers, those whose output changes most."""
    layers = sorted(list(dict.fromkeys(change.layer for change in changes))[:LAYERS])
    channels = diagnosis.channels
    for k, (energy, colour, label) in enumerate(
        [
            (channels.output_inside, "0.6", "inside the training length"),
            (channels.output_beyond, "tab:red", "beyond it"),
        ]
    ):
        shares = top_share(energy.flatten(2), TOP)[layers, row].nan_to_num(0.0).tolist()
        places = [x + 0.4 * (k - 0.5) for x in range(len(layers))]
        bars = panel.bar(places, shares, width=0.38, color=colour, label=label)
        panel.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=7)
    panel.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
