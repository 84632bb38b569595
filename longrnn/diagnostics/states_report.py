"""Writes the report of a diagnosis of states: a summary, pictures and a page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from pydantic_core import to_json
from torch import Tensor

from longrnn.diagnostics.curves import Panel, curves
from longrnn.diagnostics.observe import GLOBAL
from longrnn.diagnostics.states import MARGIN, Diagnosis
from longrnn.evaluation.figures import png
from longrnn.evaluation.report import Picture, write_page
from longrnn.files import write_atomic
from longrnn.units import format_length
from longrnn.yaml import yaml_text

# Maximum number of heads with a name in a sentence and in a picture.
NAMED = 6
STATES = (
    "{}, by tokens read: the loss; the norm of each head's state relative to the largest inside "
    "the training length (above the dashed line it is outside its range); and the share of the "
    "initial state that is left, where it is defined (above the dashed line at the training length "
    "a head is global). Coloured: the heads that grow most."
)
CHANNELS = (
    "Root mean square of each channel (row) of the state on {}, in the heads that grow most, or "
    "else in the first. Outlier channels stand far above the others at the end (arXiv 2410.07145)."
)


def write_report(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Writes the observations, the diagnosis, the pictures and the page.

    Args:
        diagnosis: what was found.
        folder: gets `states.jsonl` (one row per position, with lists by layer, text and head),
            `diagnosis.yaml` and `report.html`.

    Returns:
        The files, the report last.
    """
    states, record = folder / "states.jsonl", folder / "diagnosis.yaml"
    named = {name: one.tolist() for name, one in diagnosis.seen._asdict().items()}
    del named["channels"]
    rows = [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
    lines = [to_json(row, inf_nan_mode="null").decode() for row in rows]
    write_atomic(states, "".join(f"{line}\n" for line in lines))
    heads = {"collapsing": sorted(diagnosis.collapsing()), "global": diagnosis.global_heads()}
    content = diagnosis.about | {k: [list(pair) for pair in pairs] for k, pairs in heads.items()}
    write_atomic(record, yaml_text(content, default_flow_style=None, width=100, allow_unicode=True))
    values = {
        "about": diagnosis.about,
        "summary": summary(diagnosis),
        "collapsing": diagnosis.collapsing(),
        "findings": sorted(diagnosis.findings, key=lambda one: (not one.left, -one.growth)),
        "length": format_length,
    }
    report, *pictures = write_page("states.html", folder, list(_pictures(diagnosis)), values)
    return [states, record, *pictures, report]


def summary(diagnosis: Diagnosis) -> str:
    """Names the heads that collapse, and counts those that are global."""
    _, layers, _, heads = diagnosis.seen.norm.shape
    found = diagnosis.collapsing()
    named = ", ".join(map(_name, found[:NAMED])) + ", …" * (len(found) > NAMED)
    kept = len(diagnosis.global_heads())
    return (
        f"{len(found)} of {layers * heads} heads collapse beyond the training length: "
        f"{named or 'none'}. {kept} keep more than {GLOBAL:.0%} of a state over it."
    )


def _name(pair: tuple[int, int]) -> str:
    return f"layer {pair[0]} head {pair[1]}"


def _pictures(diagnosis: Diagnosis) -> Iterator[Picture]:
    """Draws each text by position, and the channels of the heads that grow most."""
    seen, trained = diagnosis.seen, diagnosis.about["train_length"]
    texts = [text["name"] for text in diagnosis.about["texts"]]
    at, norm = seen.position.tolist(), seen.norm
    growth = norm / norm[seen.position <= trained].amax(0)
    worst = diagnosis.collapsing()[:NAMED]
    heads = list(product(range(norm.shape[1]), range(norm.shape[3])))
    names = {head: _name(head) if head in worst else f"_{_name(head)}" for head in heads}

    def by_head(values: Tensor) -> dict[str, tuple[list[float], list[float]]]:
        return {name: (at, values[:, i, k].tolist()) for (i, k), name in names.items()}

    for text, title in enumerate(texts):
        growing, kept = by_head(growth[:, :, text]), by_head(seen.retention[:, :, text])
        panels = [
            Panel("loss\n(nats per token)", {"_loss": (at, seen.loss[:, text].tolist())}),
            Panel("norm of the state /\nlargest inside", growing, log=True, level=1 + MARGIN),
            Panel("share of the\ninitial state left", kept, level=GLOBAL),
        ]
        figure = curves(panels, across="tokens read (dotted: the training length)", trained=trained)
        yield Picture(f"states_{text + 1}", STATES.format(title), png(figure))
    ends = {"at the training length": at.index(trained), "at the end": -1}
    panels = []
    for layer, head in (worst or heads)[:3]:
        sizes = seen.channels[:, layer, 0, head]
        own = {name: (range(sizes.shape[1]), sizes[end].tolist()) for name, end in ends.items()}
        panels.append(Panel(f"root mean square,\n{_name((layer, head))}", own, log=True))
    yield Picture("channels", CHANNELS.format(texts[0]), png(curves(panels, across="channel")))
