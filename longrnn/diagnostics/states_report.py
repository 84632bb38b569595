"""Writes the report of a diagnosis of states: a summary, pictures and a page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from longrnn.diagnostics.curves import Panel, curves
from longrnn.diagnostics.observe import GLOBAL
from longrnn.diagnostics.states import MARGIN, Diagnosis
from longrnn.evaluation.report import Picture, write_page
from longrnn.units import format_length

# Maximum number of heads with a name in a sentence and in a picture.
NAMED = 6
STATES = (
    "{}, by tokens read: the loss; the norm and the mean of each head's state relative to its size "
    "inside the training length; and the share of the initial state that is left. Above the dashed "
    "lines a norm is outside its range, and a head is global at the training length. Coloured: "
    "heads that grow most. The loss can stay while a head collapses, because later layers may use "
    "little of its output. The share is not defined in an Elman cell, nor under a mitigation that "
    "redefines the recurrence."
)
CHANNELS = (
    "Root mean square of each channel of the state on {}, in the heads that grow most, or else in "
    "the one with the largest state. Outlier channels stand far above the others at the end (arXiv "
    "2410.07145). A channel is a row of the state of Mamba-2, or a unit of RNN, GRU and LSTM."
)


def write_report(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Writes the pictures and `report.html`, and returns the files, the report first."""
    values = {
        "about": diagnosis.about,
        "summary": summary(diagnosis),
        "collapsing": diagnosis.collapsing(),
        "findings": sorted(diagnosis.findings, key=lambda one: (not one.left, -one.growth)),
        "length": format_length,
    }
    return write_page("states.html", folder, list(_pictures(diagnosis)), values)


def summary(diagnosis: Diagnosis) -> str:
    """Names the heads that collapse and those that are global, in two sentences."""
    layers, _, heads = diagnosis.seen[0].norm.shape
    found = {
        "collapse beyond the training length": diagnosis.collapsing(),
        f"keep more than {GLOBAL:.0%} of a state over it": diagnosis.global_heads(),
    }
    return "\n".join(
        f"{len(pairs)} of {layers * heads} heads {what}{': ' if pairs else ''}"
        f"{', '.join(map(_name, pairs[:NAMED]))}{' and more' if len(pairs) > NAMED else ''}."
        for what, pairs in found.items()
    )


def _name(pair: tuple[int, int]) -> str:
    return f"layer {pair[0]} head {pair[1]}"


def _pictures(diagnosis: Diagnosis) -> Iterator[Picture]:
    """Draws each text by position, and the channels of the heads that grow most."""
    at, trained = [one.position for one in diagnosis.seen], diagnosis.about["train_length"]
    texts = [text["name"] for text in diagnosis.about["texts"]]
    inside = torch.tensor(at) <= trained
    norm, mean, deviation = map(diagnosis.values, ("norm", "mean", "deviation"))
    sizes = (mean.square() + deviation.square()).sqrt()
    drawn = {
        "norm of the state /\nlargest inside": norm / norm[inside].amax(0),
        "mean / largest\nr.m.s. inside": mean / sizes[inside].amax(0),
        "share of the\ninitial state left": diagnosis.values("retention"),
    }
    levels = (1 + MARGIN, None, GLOBAL)
    worst = diagnosis.collapsing()[:NAMED]
    heads = list(product(range(norm.shape[1]), range(norm.shape[3])))
    names = {head: _name(head) if head in worst else f"_{_name(head)}" for head in heads}
    for text, title in enumerate(texts):
        loss = diagnosis.values("loss")[:, text].tolist()
        panels = [Panel("loss\n(nats per token)", {"_loss": (at, loss)})]
        for (up, values), level in zip(drawn.items(), levels, strict=True):
            if not values.isnan().all():
                own = {name: (at, values[:, i, text, k].tolist()) for (i, k), name in names.items()}
                panels.append(Panel(up, own, up.startswith("norm"), level))
        data = curves(panels, across="tokens read (dotted: the training length)", trained=trained)
        yield Picture(f"states_{text + 1}", STATES.format(title), data)
    largest = divmod(int(norm[-1, :, 0].nan_to_num(torch.inf).argmax()), norm.shape[3])
    ends = {"at the training length": at.index(trained), "at the end": -1}
    panels = []
    for layer, head in worst[:3] or [largest]:
        sizes = diagnosis.values("channels")[:, layer, 0, head]
        own = {name: (range(sizes.shape[1]), sizes[end].tolist()) for name, end in ends.items()}
        panels.append(Panel(_name((layer, head)), own, log=True))
    yield Picture("channels", CHANNELS.format(texts[0]), curves(panels, across="channel"))
