"""Observes the states of a model beyond its training length and diagnoses state collapse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic_core import to_json
from torch import Tensor

from longrnn.diagnostics.collapse import CRITERION, Finding, find
from longrnn.diagnostics.observe import GLOBAL, Observation, observe
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.files import write_atomic
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.text import yaml_text
from longrnn.units import format_length

FORMAT = "longrnn-diagnosis-1"
# Tokens between observations, of which there are about MOST in a long text.
EVERY, MOST = 128, 512
# Minimum number of observations inside the training length, which determine the ranges.
INSIDE = 16


class Diagnosis(NamedTuple):
    """The findings on all heads.

    Attributes:
        about: the settings, as at the top of diagnosis.yaml.
        seen: the observations.
        findings: per layer, head and text.
    """

    about: dict[str, Any]
    seen: list[Observation]
    findings: list[Finding]

    def collapsing(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads that collapse on any text, the fastest growing first."""
        growth: dict[tuple[int, int], float] = {}
        for one in self.findings:
            if one.left:
                size = one.growth if math.isfinite(one.growth) else math.inf
                growth[one.layer, one.head] = max(size, growth.get((one.layer, one.head), 0.0))
        return sorted(growth, key=lambda pair: (-growth[pair], pair))

    def global_heads(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads that are global on any text."""
        return sorted({(one.layer, one.head) for one in self.findings if one.retention > GLOBAL})

    def values(self, name: str) -> Tensor:
        """A field of the observations, `(positions, …)`."""
        return torch.stack([getattr(one, name) for one in self.seen])


def diagnose(
    model: LanguageModel,
    documents: Sequence[Document],
    length: int,
    *,
    train_length: int,
    output: Path,
    checkpoint: str = "",
    quiet: bool = False,
) -> Diagnosis:
    """Reads texts and diagnoses every head.

    Args:
        model: with cells of longrnn, with or without a mitigation.
        documents: texts.
        length: number of tokens of each text to read.
        train_length: training length in tokens.
        output: a folder; `states.jsonl` (one row per position, with lists by layer, text and head)
            and `diagnosis.yaml` are written there at the end.
        checkpoint: name of the checkpoint, for the record.
        quiet: show no progress.

    Raises:
        UserError: the length does not exceed the training length, a text is too short, the model
            has no readable states, or logits are not finite inside the training length.
    """
    if length <= train_length:
        raise UserError(
            f"collapse shows beyond the training length of {format_length(train_length)}: "
            f"give a --length above it, not {format_length(length)}"
        )
    for one in documents:
        if len(one.tokens) < length:
            raise UserError(
                f"{one.name} has {len(one.tokens):,} tokens and {length:,} are needed: give a "
                "longer text or a smaller --length"
            )
    tokens = torch.stack([one.tokens[:length] for one in documents])
    every = max(EVERY, length // MOST)
    dense = range(0, train_length, min(every, max(1, train_length // INSIDE)))
    stops = sorted({*dense[1:], *range(every, length, every), train_length, length})
    with Progress("states", tokens.numel(), unit="tokens", quiet=quiet) as progress:
        seen = list(observe(model, tokens, stops, progress=progress))
    # A state that overflows beyond the training length is a finding; inside, the model is broken.
    if not all(one.loss.isfinite().all() for one in seen if one.position <= train_length):
        explain_nonfinite(model, tokens)
    about: dict[str, Any] = {
        "format": FORMAT,
        "checkpoint": checkpoint,
        "fingerprint": model.fingerprint(),
        "mitigation": None if model.mitigation is None else str(model.mitigation),
        "train_length": train_length,
        "length": length,
        "criterion": CRITERION,
        "texts": [{"name": one.name, "sha256": one.sha256} for one in documents],
    }
    found = Diagnosis(about, seen, find(seen, train_length))
    heads = {"collapsing": sorted(found.collapsing()), "global": found.global_heads()}
    content = about | {name: [list(pair) for pair in pairs] for name, pairs in heads.items()}
    text = yaml_text(content, default_flow_style=None, width=100, allow_unicode=True)
    write_atomic(output / "states.jsonl", "".join(map(_line, seen)))
    write_atomic(output / "diagnosis.yaml", text)
    return found


def _line(seen: Observation) -> str:
    """An observation as JSON; values that are not finite are null."""
    values = {name: value for name, value in seen._asdict().items() if name != "channels"}
    lists = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in values.items()}
    return f"{to_json(lists, inf_nan_mode='null').decode()}\n"
