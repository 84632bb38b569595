"""The report of a diagnosis of states: a summary, pictures and a page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrnn.files import write_atomic
from longrnn.reporting.figures import Panel, curves, png
from longrnn.reporting.pages import Picture, write_page, write_records
from longrnn.units import format_length
from longrnn.yaml import yaml_text

if TYPE_CHECKING:
    from torch import Tensor

    from longrnn.diagnostics.states import Diagnosis

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
    """Write the observations, the diagnosis, the pictures and the page.

    Args:
        diagnosis: what was found.
        folder: gets `states.jsonl` (one row per position, with lists by layer, text and head),
            `diagnosis.yaml` and `report.html`.

    Returns:
        The files, the report last.
    """
    states, record = folder / "states.jsonl", folder / "diagnosis.yaml"
    seen = diagnosis.seen._asdict() | {"outliers": diagnosis.seen.outliers}
    columns = {name: values.tolist() for name, values in seen.items() if name != "channels"}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    write_records(states, rows)
    heads = {"collapsing": sorted(diagnosis.collapsing()), "global": diagnosis.global_heads()}
    content = diagnosis.about | {k: [list(pair) for pair in pairs] for k, pairs in heads.items()}
    write_atomic(record, yaml_text(content, default_flow_style=None, width=100, allow_unicode=True))
    values = {
        "about": diagnosis.about,
        "summary": summary(diagnosis),
        "collapsing": diagnosis.collapsing(),
        "findings": sorted(diagnosis.findings, key=lambda finding: finding.rank),
        "length": format_length,
    }
    report, *pictures = write_page("states.html", folder, list(_pictures(diagnosis)), values)
    return [states, record, *pictures, report]


def summary(diagnosis: Diagnosis) -> str:
    """Name the heads that collapse, count those that are global, and measure the outliers."""
    seen, about = diagnosis.seen, diagnosis.about
    _, layers, _, heads = seen.norm.shape
    inside = seen.position.tolist().index(about["train_length"])
    shares = seen.outliers.flatten(1).amax(1).tolist()
    collapsing = diagnosis.collapsing()
    names = ", ".join(map(_name, collapsing[:NAMED])) + ", …" * (len(collapsing) > NAMED)
    n_global = len(diagnosis.global_heads())
    return (
        f"{len(collapsing)} of {layers * heads} heads collapse beyond the training length: "
        f"{names or 'none'}. {n_global} keep more than {about['global_retention']:.0%} "
        f"of a state over it. The largest {about['outlier_share']:.0%} of the channels of a layer "
        f"have at most {shares[-1]:.0%} of its squared norm at the end, {shares[inside]:.0%} at "
        "the training length."
    )


def _name(pair: tuple[int, int]) -> str:
    return f"layer {pair[0]} head {pair[1]}"


def _pictures(diagnosis: Diagnosis) -> Iterator[Picture]:
    """Draw each text by position, and the channels of the heads that grow most."""
    seen, about = diagnosis.seen, diagnosis.about
    trained, at = about["train_length"], seen.position.tolist()
    growth = seen.norm / seen.norm[seen.position <= trained].amax(0)
    worst = diagnosis.collapsing()[:NAMED]
    heads = list(product(range(seen.norm.shape[1]), range(seen.norm.shape[3])))

    def panel(up: str, values: Tensor, level: float, *, log: bool = False) -> Panel:
        named: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for layer, head in heads:
            curve = at, values[:, layer, head].tolist()
            (named if (layer, head) in worst else others)[_name((layer, head))] = curve
        return Panel(up, named, log, level, grey=others)

    levels = about["collapse_level"], about["global_retention"]
    for index, text in enumerate(about["texts"]):
        growing, kept = growth[:, :, index], seen.retention[:, :, index]
        panels = [
            Panel("loss\n(nats per token)", {}, grey={"": (at, seen.loss[:, index].tolist())}),
            panel("norm of the state /\nlargest inside", growing, levels[0], log=True),
            panel("share of the\ninitial state left", kept, levels[1]),
        ]
        figure = curves(panels, across="tokens read (dotted: the training length)", trained=trained)
        yield Picture(f"states_{index + 1}", STATES.format(text["name"]), png(figure))
    ends = {"at the training length": at.index(trained), "at the end": -1}
    panels = []
    for layer, head in (worst or heads)[:3]:
        sizes = seen.channels[:, layer, 0, head]
        drawn = {name: (range(sizes.shape[1]), sizes[end].tolist()) for name, end in ends.items()}
        panels.append(Panel(f"root mean square,\n{_name((layer, head))}", drawn, log=True))
    caption = CHANNELS.format(about["texts"][0]["name"])
    yield Picture("channels", caption, png(curves(panels, across="channel")))
