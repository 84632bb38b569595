"""Writes the report of a diagnosis of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longrnn.diagnostics.channels import holding
from longrnn.diagnostics.states import Diagnosis
from longrnn.diagnostics.states_overview import overview
from longrnn.diagnostics.states_pictures import by_position
from longrnn.diagnostics.states_summary import summary, worst_heads
from longrnn.evaluation.report import write_page
from longrnn.units import format_length

# Maximum number of heads in the table of channels.
TABLE_HEADS = 16


def write_report(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write the pictures and `report.html`.

    Args:
        diagnosis: of `diagnose`.
        folder: of its other files.

    Returns:
        The files, the report first.
    """
    pictures = [overview(diagnosis), *by_position(diagnosis)]
    values = {
        "about": diagnosis.about,
        "summary": summary(diagnosis),
        "findings": diagnosis.findings,
        "channels": channel_table(diagnosis),
        "outputs": output_table(diagnosis),
        "collapsing": diagnosis.collapsing(),
        "globals": diagnosis.global_heads(),
        "prompts": diagnosis.prompts,
        "length": format_length,
        "undefined": None if diagnosis.retention_is_defined() else UNDEFINED,
    }
    return write_page("states.html", folder, pictures, values)


UNDEFINED = (
    "Retention and the share of the first tokens are not defined here: the state is not a weighted "
    "sum over tokens in an Elman cell, nor under a mitigation that redefines the recurrence."
)


def channel_table(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return one row per prompt for the heads that grow most: channels of the state and output."""
    channels = diagnosis.channels
    trained, end = channels.holding_trained(), channels.holding_end()
    inside, beyond = channels.shares_inside().sum(-1), channels.shares_beyond().sum(-1)
    return [
        {
            "layer": layer,
            "head": head,
            "prompt": prompt.name,
            "outliers": channels.outlier[layer, row, head].nonzero()[:, 0].tolist(),
            "largest": channels.largest_end[layer, row, head].max().item(),
            "trained": trained[layer, row, head].item(),
            "end": end[layer, row, head].item(),
            "channels": channels.outlier.shape[-1],
            "output_inside": inside[layer, row, head].item(),
            "output_beyond": beyond[layer, row, head].item(),
        }
        for layer, head in worst_heads(diagnosis)[:TABLE_HEADS]
        for row, prompt in enumerate(diagnosis.prompts)
    ]


def output_table(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return one row per layer and prompt: how concentrated the output is, by channel."""
    channels = diagnosis.channels
    inside = holding(channels.output_inside.flatten(2))
    beyond = holding(channels.output_beyond.flatten(2))
    return [
        {
            "layer": layer,
            "prompt": prompt.name,
            "inside": inside[layer, row].item(),
            "beyond": beyond[layer, row].item(),
            "channels": channels.outlier[0, 0].numel(),
        }
        for layer in range(len(inside))
        for row, prompt in enumerate(diagnosis.prompts)
    ]
