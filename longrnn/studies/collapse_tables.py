"""Tables of the study of state collapse, in Markdown, from rows of results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from longrnn.errors import UserError
from longrnn.evaluation import perplexity
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.passkey import summarise
from longrnn.intervals import Estimate, mean, paired_mean
from longrnn.results import Row, read_results
from longrnn.studies.long_stream import Stream, late_against_fresh
from longrnn.studies.loss_inside import Losses
from longrnn.units import format_length


def stream_table(found: Mapping[str, Stream]) -> list[str]:
    """Return one row per model: the loss by octave of the stream, and the two ratios."""
    first = next(iter(found.values()))
    length, block = first.row["length"], first.block
    starts = [block // 2 * 2**k for k in range((length // block).bit_length())]
    spans = [f"{format_length(start)} to {format_length(2 * start)}" for start in starts]
    lines = [
        f"| mitigation | {' | '.join(spans)} | last / {spans[0]} | last octave, blocks afresh "
        "| stream / afresh |",
        "| --- " * (len(spans) + 4) + "|",
    ]
    for name, stream in found.items():
        row = stream.row
        values = dict(zip(perplexity.edges(length), row["buckets"], strict=False))
        octaves = [values[start] for start in starts]
        ratio, early = late_against_fresh(stream)
        cells = [f"{value:.3f}" for value in octaves]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {octaves[-1] / octaves[0]:.3f} | {_shown(early)} "
            f"| {_shown(ratio)} |"
        )
    return lines


def books_table(
    found: Mapping[str, Losses],
    on_choice: Mapping[str, Sequence[Row]],
    trained: int,
    columns: Sequence[int],
    chosen: Collection[str],
) -> list[str]:
    """Return one row per variant: losses in nats per token by position, and the verdict.

    Args:
        found: results by variant; that of `none` is what the others are compared with.
        on_choice: rows of `perplexity.evaluate` by variant, on the text for choosing settings.
            Variants that are only there get no other figures.
        trained: the training length.
        columns: ends of the ranges of positions to show; each begins at half of its end.
        chosen: the variants to mark.
    """
    heads = [
        "text for choosing",
        f"windows of {format_length(trained)}, against none",
        *(f"{format_length(stop // 2)} to {format_length(stop)}" for stop in columns),
        "all, bits per byte",
        "most beyond / inside",
        "forgets robustly",
    ]
    lines = [f"| mitigation | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    plain = _inside(found["none"])
    for name, rows in on_choice.items():
        cells = ["–"] * (len(heads) - 1)
        if name in found:
            against = paired_mean(_inside(found[name]), plain)
            inside = f"{mean(plain).mean:.3f}" if name == "none" else _shown(against, signed=True)
            cells = [inside, *_cells(found[name].long, trained, columns)]
        choice = f"{perplexity.summarise(rows)[0].nats.mean:.3f}"
        title = f"**{name}**" if name in chosen else name
        lines.append(f"| {title} | {choice} | {' | '.join(cells)} |")
    return lines


def _cells(rows: Sequence[Row], trained: int, columns: Sequence[int]) -> list[str]:
    """Losses by position, bits per byte, and the criterion of robust forgetting."""
    whole, buckets = perplexity.summarise(rows)
    shown = [_shown(next(b for b in buckets if b.stop >= stop).nats) for stop in columns]
    verdict = forgetting(rows, trained)
    assert verdict is not None  # the windows are longer than the training length
    return [
        *shown,
        "unknown" if whole.bits is None else _shown(whole.bits),
        f"{verdict.beyond / verdict.inside:.2f}",
        "yes" if verdict.robust else "no",
    ]


def rows_by_variant(folder: Path) -> dict[str, list[Row]]:
    """Return the rows of the results files of a folder, by variant.

    Raises:
        UserError: there is none.
    """
    paths = [path for path in folder.glob("*.jsonl") if not path.stem.endswith("-inside")]
    if not paths:
        raise UserError(f"{folder} has no results: run `books` and `passkey` first")
    paths.sort(key=lambda path: path.stat().st_ctime)
    return {path.stem: read_results(path)[1] for path in paths}


def axes_table(
    losses: Mapping[str, Sequence[Row]], keys: Mapping[str, Mapping[str, Sequence[Row]]]
) -> list[str]:
    """Return one row per variant: its loss in the last octave, and the keys recalled.

    Args:
        losses: rows of `perplexity.evaluate` by variant.
        keys: by model, rows of `passkey.evaluate` by variant; the longest length counts. A variant
            without rows has a dash.
    """
    length = next(iter(losses.values()))[0]["length"]
    heads = [f"keys of {model}" for model in keys]
    lines = [
        f"| mitigation | loss, {format_length(length // 2)} to {format_length(length)} "
        f"| {' | '.join(heads)} |",
        "| --- " * (len(heads) + 2) + "|",
    ]
    names = dict.fromkeys([*losses, *(name for rows in keys.values() for name in rows)])
    for name in names:
        cells = ["–"]
        if name in losses:
            cells = [_shown(perplexity.summarise(losses[name])[1][-1].nats)]
        for found in keys.values():
            cells.append(_recalled(found[name]) if found.get(name) else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _recalled(rows: Sequence[Row]) -> str:
    shares = summarise(rows)
    length = max(length for length, _ in shares)
    share = shares[length, None]
    return f"{share} ({share.n}) at {format_length(length)}"


def _inside(losses: Losses) -> list[float]:
    return [row["nats_per_token"] for row in losses.inside]


def _shown(estimate: Estimate, signed: bool = False) -> str:
    """A mean with its interval."""
    sign = "+" if signed else ""
    center = f"{estimate.mean:{sign}.3f}"
    if estimate.n == 1:
        return center
    return f"{center} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
