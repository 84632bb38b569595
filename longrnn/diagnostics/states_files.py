"""The rows and the YAML file of a diagnosis of states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import yaml
from torch import Tensor

from longrnn.diagnostics.channels import Channels, holding
from longrnn.diagnostics.record import ChannelStatistics, HeadStatistics, Measurement

if TYPE_CHECKING:
    from longrnn.diagnostics.states import Diagnosis


def tables(heads: HeadStatistics, channels: ChannelStatistics) -> dict[str, Tensor]:
    """Return the statistics of one layer at one position by name, without those not defined.

    Returns:
        `(b, h)` each, `output_norm` and `output_channels_90` `(b,)`: the fields of
        `HeadStatistics`; `largest`, the largest absolute value of an entry; `channels_90`, the
        number of channels that hold 90 % of the energy of the head's state; `top_channel`, the
        largest channel; `output_share`, the share of the head in the layer's output energy; and
        `output_channels_90`, the number of the layer's channels that hold 90 % of it.
    """
    energy = channels.energy
    found = {
        **heads._asdict(),
        "largest": channels.largest.amax(-1),
        "channels_90": holding(channels.rms.square()),
        "top_channel": channels.rms.argmax(-1).double(),
        "output_share": energy.sum(-1) / energy.sum((-2, -1))[:, None],
        "output_channels_90": holding(energy.flatten(1)),
    }
    return {name: table for name, table in found.items() if table is not None}


def rows(measured: Measurement, prompts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield one row per layer, head and prompt; values not defined or not finite are null."""
    losses = measured.loss.tolist()
    undefined = dict.fromkeys(HeadStatistics._fields)
    for layer, (heads, channels) in enumerate(zip(measured.heads, measured.channels, strict=True)):
        defined = tables(heads, channels)
        values = {name: table.tolist() for name, table in defined.items()}
        for row, prompt in enumerate(prompts):
            for head in range(heads.mean.shape[1]):
                own = {
                    name: table[row][head] if defined[name].dim() == 2 else table[row]
                    for name, table in values.items()
                }
                yield {
                    "layer": layer,
                    "head": head,
                    "prompt": prompt,
                    "position": measured.position,
                    **undefined,
                    **{name: _number(name, value) for name, value in own.items()},
                    "loss": _finite(losses[row]),
                }


def channel_rows(channels: Channels, prompts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield one row per layer, head and prompt, with one list over channels per statistic.

    `outliers` lists the indices of outlier channels. Output shares are those of the channel in the
    layer's output energy, and add up to 1 over all heads.
    """
    values = {
        "rms_trained": channels.rms_trained,
        "rms_end": channels.rms_end,
        "largest_trained": channels.largest_trained,
        "largest_end": channels.largest_end,
        "output_share_inside": channels.shares_inside(),
        "output_share_beyond": channels.shares_beyond(),
    }
    layers, _, heads, _ = channels.outlier.shape
    for layer, head, row in product(range(layers), range(heads), range(len(prompts))):
        at = layer, row, head
        yield {
            "layer": layer,
            "head": head,
            "prompt": prompts[row],
            "outliers": channels.outlier[at].nonzero()[:, 0].tolist(),
            **{name: [_finite(v) for v in table[at].tolist()] for name, table in values.items()},
        }


def yaml_of(found: Diagnosis) -> str:
    """Return the content of diagnosis.yaml."""
    evidence = [
        {
            "layer": finding.layer,
            "head": finding.head,
            "prompt": finding.prompt,
            "left": list(finding.left),
            "onset": finding.onset,
            "growth": _finite(finding.growth),
        }
        for finding in found.findings
        if finding.left
    ]
    content = {
        **found.about,
        "collapsing": found.collapsing(),
        "global": found.global_heads(),
        "evidence": evidence,
        "outlier_channels": _outliers(found),
        "output": _outputs(found),
    }
    return yaml.safe_dump(
        content, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
    )


def _outliers(found: Diagnosis) -> list[dict[str, Any]]:
    """Return the outlier channels of every head that has some."""
    names = [prompt.name for prompt in found.prompts]
    return [
        {key: row[key] for key in ("layer", "head", "prompt")} | {"channels": row["outliers"]}
        for row in channel_rows(found.channels, names)
        if row["outliers"]
    ]


def _outputs(found: Diagnosis) -> list[dict[str, Any]]:
    """Return how the output energy of every layer is distributed, inside and beyond."""
    channels = found.channels
    inside = holding(channels.output_inside.flatten(2))
    beyond = holding(channels.output_beyond.flatten(2))
    return [
        {
            "layer": change.layer,
            "prompt": found.prompts[change.prompt].name,
            "moved": round(change.moved, 6),
            "channels": channels.outlier[0, 0].numel(),
            "channels_90_inside": _count(inside[change.layer, change.prompt]),
            "channels_90_beyond": _count(beyond[change.layer, change.prompt]),
            "head_shares_inside": [_finite(round(share, 6)) for share in change.inside],
            "head_shares_beyond": [_finite(round(share, 6)) for share in change.beyond],
        }
        for change in channels.output_changes()
    ]


# Statistics that count or name channels.
_WHOLE = ("channels_90", "top_channel", "output_channels_90")


def _number(name: str, value: float) -> float | int | None:
    """Return a value as JSON has it."""
    return _count(value) if name in _WHOLE else _finite(value)


def _count(number: float | Tensor) -> int | None:
    return int(number) if math.isfinite(number) else None


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
