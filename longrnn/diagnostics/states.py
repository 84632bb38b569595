"""Records the states of a model beyond its training length and diagnoses state collapse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.diagnostics.channels import OUTLIER_CRITERION, ChannelDetector, Channels
from longrnn.diagnostics.collapse import CRITERION, GLOBAL, CollapseDetector, Finding
from longrnn.diagnostics.readers import reader_of
from longrnn.diagnostics.record import Measurement, read
from longrnn.diagnostics.states_files import channel_rows, rows, tables, yaml_of
from longrnn.errors import UserError
from longrnn.evaluation import texts
from longrnn.evaluation.texts import Document
from longrnn.files import replacing, write_atomic
from longrnn.models import LanguageModel
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.text import Tokenizer
from longrnn.units import format_length

FORMAT = "longrnn-diagnosis-1"
# Minimum number of measurements inside the training length, which determine the ranges.
INSIDE = 16
# Number of measurements kept for plots, evenly spaced in the logarithm of the position.
DRAWN = 160


class Prompt(NamedTuple):
    """`tokens`: `(t,)` int64; `sha256`: of the text that begins with them."""

    name: str
    sha256: str
    tokens: Tensor


class Curves(NamedTuple):
    """Measurements for plots.

    Attributes:
        positions: numbers of tokens read.
        values: by name (see `states_files.tables`), `(positions, layers, prompts, heads)`;
            `output_norm` has no heads, `loss` is `(positions, prompts)`; statistics that are not
            defined are left out.
        low: widened lower ends of the ranges, `(layers, statistics, prompts, heads)`.
        high: widened upper ends.
    """

    positions: list[int]
    values: dict[str, Tensor]
    low: Tensor
    high: Tensor


class Diagnosis(NamedTuple):
    """The findings on all heads; `about` holds the settings, as at the top of diagnosis.yaml."""

    about: dict[str, Any]
    prompts: list[Prompt]
    findings: list[Finding]
    curves: Curves
    channels: Channels

    def collapsing(self) -> list[list[int]]:
        """Return `[layer, head]` of the heads that collapse on any prompt."""
        return _pairs(finding for finding in self.findings if finding.left)

    def global_heads(self) -> list[list[int]]:
        """Return `[layer, head]` of the heads that are global on any prompt."""
        return _pairs(f for f in self.findings if f.retention is not None and f.retention > GLOBAL)

    def retention_is_defined(self) -> bool:
        """Whether retention, which defines global heads, exists for this model."""
        return self.findings[0].retention is not None


def diagnose(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    train_length: int,
    output: Path,
    checkpoint: str = "",
    every: int = 128,
    first: int = 128,
    quiet: bool = False,
) -> Diagnosis:
    """Process prompts and diagnose every head.

    Args:
        model: whose states can be read, see `readers`; with or without a mitigation.
        prompts: all of one length.
        train_length: training length in tokens.
        output: a folder; `states.jsonl` (one row per layer, head, prompt and position),
            `channels.jsonl` (one row per layer, head and prompt, with lists by channel) and
            `diagnosis.yaml` are written there, each when it is complete.
        checkpoint: name of the checkpoint, for the record.
        every: tokens between measurements; there are at least INSIDE inside the training length.
        first: number of first tokens for `HeadStatistics.first_share`.
        quiet: show no progress.

    Raises:
        UserError: the length does not exceed the training length, settings are out of range, or
            logits are not finite inside the training length.
    """
    reader = reader_of(model)
    length = len(prompts[0].tokens)
    _check_settings(length, train_length, every=every, first=first)
    named = _named(prompts)
    stops = _stops(length, train_length, every)
    drawn = set(_thinned(stops))
    tokens = torch.stack([prompt.tokens for prompt in named])
    # A state that overflows beyond the training length is a finding; inside, the model is broken.
    inside = tokens[:, :train_length].to(model.init_state(1).position.device)
    refuse_nonfinite(model(inside, keep=1).logits, model, inside)
    names = [prompt.name for prompt in named]
    detector = CollapseDetector(
        train_length, layers=reader.n_layers, prompts=names, heads=reader.n_heads
    )
    channels = ChannelDetector(train_length)
    points: list[Measurement] = []
    with (
        Progress("states", tokens.numel(), unit="tokens", quiet=quiet) as progress,
        replacing(output / "states.jsonl") as file,
    ):
        for measured in read(model, tokens, stops, first=first, progress=progress):
            detector.see(measured.position, measured.heads)
            channels.see(measured.position, measured.channels)
            if measured.position in drawn:
                points.append(measured)
            for row in rows(measured, names):
                file.write((json.dumps(row) + "\n").encode())
    about: dict[str, Any] = {
        "format": FORMAT,
        "checkpoint": checkpoint,
        "fingerprint": model.fingerprint(),
        "mitigation": None if model.mitigation is None else str(model.mitigation),
        "train_length": train_length,
        "length": length,
        "every": every,
        "first": first,
        "criterion": CRITERION,
        "outlier_criterion": OUTLIER_CRITERION,
        "prompts": [{"name": p.name, "sha256": p.sha256, "tokens": length} for p in named],
    }
    curves = _curves(points, detector)
    found = Diagnosis(about, named, detector.findings(), curves, channels.result())
    lines = (json.dumps(row) + "\n" for row in channel_rows(found.channels, names))
    write_atomic(output / "channels.jsonl", "".join(lines))
    write_atomic(output / "diagnosis.yaml", yaml_of(found))
    return found


def _check_settings(length: int, train_length: int, *, every: int, first: int) -> None:
    """Refuses settings of `diagnose` that are out of range."""
    if every < 1 or first < 1 or train_length < 1:
        raise UserError(
            "every, first and the training length must be at least 1: give positive numbers"
        )
    if length <= train_length:
        raise UserError(
            f"collapse shows beyond the training length of {format_length(train_length)}: "
            f"give a --length above it, not {format_length(length)}"
        )
    if first >= length:
        raise UserError(
            f"first must be below the length of {format_length(length)}, not {first}: give a "
            "smaller one"
        )


def text_prompt(document: Document, length: int) -> Prompt:
    """The first `length` tokens of a text.

    Raises:
        UserError: the text is shorter.
    """
    if len(document.tokens) < length:
        raise UserError(
            f"{document.name} has {len(document.tokens):,} tokens and {length:,} are asked: "
            "give a longer text or a smaller --length"
        )
    return Prompt(document.name, document.sha256, document.tokens[:length])


def newlines(tokenizer: Tokenizer, length: int) -> Prompt:
    """The token of a newline, over and over; where a newline is several tokens, these.

    Raises:
        UserError: the tokenizer has no newline.
    """
    document = texts.newlines(tokenizer, length)
    return Prompt(document.name, document.sha256, document.tokens[:length])


def _named(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts whose names tell them apart."""
    names = [prompt.name for prompt in prompts]
    return [
        p._replace(name=f"{p.name} ({p.sha256[:8]})") if names.count(p.name) > 1 else p
        for p in prompts
    ]


def _stops(length: int, train_length: int, every: int) -> list[int]:
    """Where readings are taken: every so many tokens, and at INSIDE places or more inside."""
    dense = min(every, max(1, train_length // INSIDE))
    inside = range(dense, train_length + 1, dense)
    return sorted({*inside, *range(every, length + 1, every), train_length, length})


def _thinned(stops: Sequence[int]) -> list[int]:
    """About DRAWN of them, evenly spaced in the logarithm."""
    step = (stops[-1] / stops[0]) ** (1 / DRAWN)
    kept = [stops[0]]
    for stop in stops[1:]:
        if stop >= kept[-1] * step or stop == stops[-1]:
            kept.append(stop)
    return kept


def _curves(points: Sequence[Measurement], detector: CollapseDetector) -> Curves:
    layers = [[tables(h, c) for h, c in zip(p.heads, p.channels, strict=True)] for p in points]
    values = {
        name: torch.stack([torch.stack([layer[name] for layer in one]) for one in layers])
        for name in layers[0][0]
    }
    values["loss"] = torch.stack([point.loss for point in points])
    low, high = detector.bounds()
    return Curves([point.position for point in points], values, low, high)


def _pairs(findings: Iterable[Finding]) -> list[list[int]]:
    return [list(pair) for pair in sorted({(f.layer, f.head) for f in findings})]
