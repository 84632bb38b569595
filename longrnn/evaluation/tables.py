"""Prints the results of evaluations as tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from longrnn.console import print_table
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.paired import Difference
    from longrnn.inference.engine import Cost
    from longrnn.inference.overlapping import Overlap
    from longrnn.intervals import Estimate
    from longrnn.results import Row


def print_perplexity(rows: Sequence[Row], by_position: bool) -> None:
    """Prints the mean loss, and with `by_position` a table of the loss per range of positions.

    Bits per byte are those of the scored tokens over the bytes that these tokens stand for.
    """
    from math import exp

    from rich.table import Table

    from longrnn.evaluation.perplexity import summarise

    whole, buckets = summarise(rows)
    n = len(rows)
    if by_position:
        table = Table()
        table.add_column("positions", justify="right")
        table.add_column("nats per token")
        table.add_column("bits per byte")
        for bucket in buckets:
            span = f"[{bucket.start:,}, {bucket.stop:,})"
            table.add_row(span, _loss(bucket.nats), _bits(bucket.bits))
        print_table(table, 80)
    intervals = f"n = {n} windows, 95 % intervals"
    if n == 1:
        intervals = "one window: no interval can be given"
    print(
        f"{_loss(whole.nats)} nats per token, {_bits(whole.bits)} bits per byte, "
        f"perplexity {exp(min(whole.nats.mean, 700)):,.2f} ({intervals})"
    )


def print_paired(
    names: Sequence[str],
    measured: Sequence[Sequence[Row]],
    differences: Sequence[Difference],
    positions: Sequence[Sequence[Difference]],
) -> None:
    """Prints the bits per byte of every model and its difference from the first model.

    Args:
        names: names of the models; the others are compared with the first one.
        measured: rows of each model.
        differences: differences of the models after the first one.
        positions: the same by range of positions; one empty list per model prints no such table.
    """
    from rich.table import Table

    from longrnn.evaluation.perplexity import edges

    table = Table()
    for name in ("model", "bits per byte", f"difference from {names[0]} [95 %]"):
        table.add_column(name)
    table.add_row(names[0], f"{differences[0].first:.4f}", "")
    for name, difference in zip(names[1:], differences, strict=True):
        table.add_row(name, f"{difference.second:.4f}", _signed(difference))
    width = 60 + 2 * sum(map(len, names))
    print_table(table, width)
    n_bytes = sum(row["bytes"] for row in measured[0])
    basis = differences[0].basis()
    print(f"{len(measured[0])} windows, {n_bytes:,} bytes, the same for all; {basis}")
    if not positions[0]:
        return
    title = f"nats per token, and the difference from {names[0]} [95 %]"
    table = Table(title=title, title_justify="left")
    table.add_column("positions", justify="right")
    for name in names:
        table.add_column(name, overflow="fold")
    bounds = edges(measured[0][0]["length"])
    for k, first in enumerate(positions[0]):
        cells = [f"{one[k].second:.3f} ({_signed(one[k])})" for one in positions]
        table.add_row(f"[{bounds[k]:,}, {bounds[k + 1]:,})", f"{first.first:.3f}", *cells)
    print_table(table, 40 + 34 * len(positions))


def _signed(difference: Difference) -> str:
    """A difference with its sign, and with its interval if it has one."""
    estimate = difference.estimate
    interval = ""
    if difference.unit != "none":
        interval = f" [{estimate.low:+.4f}, {estimate.high:+.4f}]"
    return f"{estimate.mean:+.4f}{interval}"


def print_overlap(overlap: Overlap | None, rows: Sequence[Row]) -> None:
    """Prints what overlapping windows cost; nothing for a state that is carried through a text."""
    if overlap is None:
        return
    scored = sum(row["length"] for row in rows)
    read = sum(overlap.tokens_read(row["length"]) for row in rows)
    print(
        f"Overlapping windows of {format_length(overlap.context)} tokens, one every "
        f"{format_length(overlap.stride)}, each from an empty state: {read:,} tokens are read to "
        f"score {scored:,}, {read / scored:.2f} per scored token (1 with a carried state)."
    )


def print_forgetting(
    rows: Sequence[Row], trained: int | None, vocab_size: int, overlap: Overlap | None = None
) -> None:
    """Prints whether the model forgets robustly, and the numbers that this criterion compares."""
    from math import log

    from longrnn.evaluation.forgetting import FACTOR, forgetting

    if overlap is not None:
        print(
            "forgets robustly: not judged, because no state is carried further than the "
            f"{format_length(overlap.context)} tokens of an overlapping window"
        )
        return
    if trained is None:
        print("forgets robustly: not judged without a training length: give --train-length")
        return
    found = forgetting(rows, trained)
    if found is None:
        print(
            "forgets robustly: not judged, because no window is longer than the training length "
            f"of {format_length(trained)}"
        )
        return
    print(
        f"forgets robustly: {'yes' if found.robust else 'no'}. Beyond the training length of "
        f"{format_length(trained)} the loss reaches {found.beyond:.3f} nats (from position "
        f"{found.beyond_at:,}), {found.beyond / found.inside:.2f} × its largest inside "
        f"({found.inside:.3f}, from position {found.inside_at:,}); at most {FACTOR:g} × is robust. "
        f"Means over stretches of {found.width} tokens and all windows."
    )
    if found.inside > log(vocab_size):
        print(
            f"This says little: inside the training length the loss is already above that of a "
            f"uniform guess ({log(vocab_size):.3f} nats), so the text is unlike its training."
        )


def print_passkey(name: str, rows: Sequence[Row]) -> None:
    """Prints accuracy by length (down) and depth (across), with Wilson intervals."""
    from rich.table import Table

    from longrnn.evaluation.passkey import summarise

    cells = summarise(rows)
    depths = sorted({depth for _, depth in cells if depth is not None})
    table = Table(title=f"{name}: passkeys recalled [95 % Wilson interval]", title_justify="left")
    table.add_column("length", justify="right")
    table.add_column("n", justify="right")
    for depth in depths:
        table.add_column(f"depth {depth:.0%}")
    table.add_column("all depths")
    for length in sorted({length for length, _ in cells}):
        total = cells[length, None]
        row = [str(cells[length, depth]) for depth in depths]
        count = f"{len(depths)} × {total.n // len(depths)}"
        table.add_row(format_length(length), count, *row, str(total))
    print_table(table, 24 + 20 * (len(depths) + 1))
    _print_overlap(rows)


def print_passkey_inserted(name: str, rows: Sequence[Row]) -> None:
    """Prints accuracy by length (down) and filler before the key (across)."""
    from rich.table import Table

    from longrnn.evaluation.passkey import summarise_inserted

    cells = summarise_inserted(rows)
    places = sorted({place for _, place in cells if place is not None})
    title = f"{name}: passkeys recalled, by filler before the key [95 % Wilson interval]"
    table = Table(title=title, title_justify="left")
    table.add_column("length", justify="right")
    for place in places:
        table.add_column(format_length(place), justify="right")
    table.add_column("all")
    table.add_column("n", justify="right")
    for length in sorted({length for length, _ in cells}):
        total = cells[length, None]
        row = [cells.get((length, place)) for place in places]
        means = ["" if cell is None else f"{cell.mean:.2f}" for cell in row]
        table.add_row(format_length(length), *means, str(total), str(total.n))
    print_table(table, 44 + 8 * len(places))
    _print_overlap(rows)


def _print_overlap(rows: Sequence[Row]) -> None:
    """Prints the effective number of prompts if several prompts contain the same filler text."""
    from longrnn.evaluation.passkey import independent

    lengths: dict[int, list[Row]] = {}
    for row in rows:
        lengths.setdefault(row["length"], []).append(row)
    counts = {length: independent(own) for length, own in lengths.items()}
    counted = [
        f"{count:.1f} of {len(lengths[length])} at {format_length(length)}"
        for length, count in sorted(counts.items())
        if count is not None
    ]
    if counted:
        print(
            "Prompts that contain the same filler text are not independent: the intervals count "
            f"{', '.join(counted)}."
        )


def print_cost(costs: Mapping[str, Cost]) -> None:
    """Prints how many tokens prefix sharing saves; models with equal costs share a sentence."""
    for cost in dict.fromkeys(costs.values()):
        print(
            f"Sharing prefixes, the whole grid takes {cost.shared:,} tokens per model; prompt by "
            f"prompt it takes {cost.naive:,}, {cost.ratio:.1f} × as many."
        )


def _bits(estimate: Estimate | None) -> str:
    """Bits per byte, or "unknown" if the tokenizer does not give the bytes of its tokens."""
    return "unknown" if estimate is None else _loss(estimate)


def _loss(estimate: Estimate) -> str:
    """A mean, with its interval if there are several values."""
    interval = f" [{estimate.low:.3f}, {estimate.high:.3f}]" if estimate.n > 1 else ""
    return f"{estimate.mean:.3f}{interval}"
