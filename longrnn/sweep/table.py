"""Tables of a sweep: means over seeds, and paired differences from a baseline, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from longrnn.errors import UserError, nearest
from longrnn.intervals import Estimate, mean
from longrnn.results import Row
from longrnn.sweep.grid import Axes

SEED = "seed"
# Pairs of runs that a verdict needs.
LEAST_PAIRS = 3
Key = tuple[str, ...]


class Difference(NamedTuple):
    """A group of runs against its baseline.

    Attributes:
        values: of the group, by key of the grid.
        against: of the baseline.
        metric: what is compared.
        estimate: mean and interval, over seeds, of the differences of runs of one seed.
    """

    values: dict[str, str]
    against: dict[str, str]
    metric: str
    estimate: Estimate

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, or `inconclusive`, see `verdict`."""
        return verdict(self.estimate)


def verdict(difference: Estimate) -> str:
    """`higher`, `lower`, or `inconclusive`: where the interval holds 0, or has too few pairs.

    Two pairs of shares of the same sequences agree by chance, and their interval is then a point.
    """
    if difference.n < LEAST_PAIRS:
        return "inconclusive"
    if difference.low > 0:
        return "higher"
    return "lower" if difference.high < 0 else "inconclusive"


def parse_baseline(text: str, axes: Axes) -> tuple[str, str]:
    """Key and value of `position.kind=duplicate`.

    Raises:
        UserError: a key or value that the grid does not have.
    """
    key, equals, value = text.partition("=")
    if not equals or key not in axes or key == SEED:
        raise UserError(
            f"baseline {text!r} names no value of the grid: "
            f"{nearest(key, [name for name in axes if name != SEED])}"
        )
    if value not in axes[key]:
        raise UserError(f"baseline {text!r} is not in the grid: {nearest(value, axes[key])}")
    return key, value


def groups(rows: Sequence[Row], axes: Axes) -> dict[Key, dict[str, Row]]:
    """Rows by the values of all keys but the seed, each by its seed."""
    keys = [key for key in axes if key != SEED]
    found: dict[Key, dict[str, Row]] = {}
    for row in rows:
        group = tuple(row["values"][key] for key in keys)
        found.setdefault(group, {})[row["values"].get(SEED, "")] = row
    return found


def means(rows: Sequence[Row], axes: Axes) -> list[tuple[dict[str, str], dict[str, Estimate]]]:
    """For each group its values, and every metric over seeds."""
    keys = [key for key in axes if key != SEED]
    found = []
    for group, by_seed in groups(rows, axes).items():
        names = dict.fromkeys(name for row in by_seed.values() for name in row["metrics"])
        values = {
            name: mean([r["metrics"][name] for r in by_seed.values() if name in r["metrics"]])
            for name in names
        }
        found.append((dict(zip(keys, group, strict=True)), values))
    return found


def differences(
    rows: Sequence[Row], axes: Axes, baseline: tuple[str, str], metric: str
) -> list[Difference]:
    """Every group against the one with the baseline's value and otherwise equal ones, by seed."""
    keys = [key for key in axes if key != SEED]
    place = keys.index(baseline[0])
    by_group = groups(rows, axes)
    found = []
    for group, by_seed in by_group.items():
        other = (*group[:place], baseline[1], *group[place + 1 :])
        if group == other:
            continue
        pairs = [
            (row["metrics"], by_group[other][seed]["metrics"])
            for seed, row in by_seed.items()
            if seed in by_group.get(other, {})
        ]
        less = [a[metric] - b[metric] for a, b in pairs if metric in a and metric in b]
        if less:
            values, against = (dict(zip(keys, g, strict=True)) for g in (group, other))
            found.append(Difference(values, against, metric, mean(less)))
    return found


def shown(estimate: Estimate, digits: int = 3) -> str:
    """A mean with its interval over seeds, where there are several."""
    if math.isinf(estimate.high):
        return f"{estimate.mean:.{digits}f}"
    interval = f"[{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
    return f"{estimate.mean:.{digits}f} {interval}"


def markdown(rows: Sequence[Row], axes: Axes, baseline: tuple[str, str] | None) -> list[str]:
    """The tables of a sweep in Markdown."""
    found = means(rows, axes)
    if not found:
        return ["No run is done."]
    keys = list(found[0][0])
    metrics = list(dict.fromkeys(name for _, values in found for name in values))
    lines = table([*keys, "runs", *metrics], [])
    for values, estimates in found:
        n = max(estimate.n for estimate in estimates.values())
        cells = [shown(estimates[name]) if name in estimates else "–" for name in metrics]
        lines.append(_row([*values.values(), n, *cells]))
    if baseline is not None:
        key, value = baseline
        others = [name for name in keys if name != key]
        head = [
            *others,
            key,
            "pairs",
            *(f"{metric} − {value}" for metric in metrics),
            f"verdict on {metrics[0]}",
        ]
        lines += ["", *table(head, paired(rows, axes, baseline, metrics, others))]
    return lines


def paired(
    rows: Sequence[Row],
    axes: Axes,
    baseline: tuple[str, str],
    metrics: list[str],
    others: list[str],
) -> list[list[Any]]:
    """Cells of the differences of all metrics; the last one is the verdict on the first."""
    columns = [differences(rows, axes, baseline, metric) for metric in metrics]
    cells = []
    for first in columns[0]:
        same = [next((d for d in column if d.values == first.values), None) for column in columns]
        texts = ["–" if d is None else shown(d.estimate) for d in same]
        own = [*(first.values[name] for name in others), first.values[baseline[0]]]
        cells.append([*own, first.estimate.n, *texts, first.verdict])
    return cells


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table in Markdown."""
    return [_row(head), "| --- " * len(head) + "|", *map(_row, rows)]


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
