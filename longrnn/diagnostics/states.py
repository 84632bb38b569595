"""Observes the states of a model beyond its training length and diagnoses state collapse."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.diagnostics.collapse import CRITERION, Finding, find
from longrnn.diagnostics.layer_statistics import GLOBAL
from longrnn.diagnostics.observe import LayerObservation, observe
from longrnn.errors import UserError
from longrnn.evaluation import texts
from longrnn.evaluation.texts import Document
from longrnn.files import write_atomic
from longrnn.models import LanguageModel
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.text import Tokenizer, yaml_text
from longrnn.units import format_length

FORMAT = "longrnn-diagnosis-1"
# Tokens between observations, of which there are about MOST in a long prompt; and first tokens of a
# prompt whose share of the state is measured.
EVERY, MOST, FIRST = 128, 512, 128
# Minimum number of observations inside the training length, which determine the ranges.
INSIDE = 16
PER_HEAD = tuple(name for name in LayerObservation._fields if name != "channels")


class Prompt(NamedTuple):
    """`tokens`: `(t,)` int64; `sha256`: of the text that begins with them."""

    name: str
    sha256: str
    tokens: Tensor


class Diagnosis(NamedTuple):
    """The findings on all heads.

    Attributes:
        about: the settings, as at the top of diagnosis.yaml.
        prompts: with names that differ.
        positions: of the observations.
        values: PER_HEAD by name, `(positions, layers, prompts, heads)`; the heads of a layer share
            `output_norm`. `loss` is `(positions, prompts)`.
        channels: `LayerObservation.channels` at the training length and at the end,
            `(2, layers, prompts, heads, p)`.
        findings: per layer, head and prompt.
    """

    about: dict[str, Any]
    prompts: list[Prompt]
    positions: list[int]
    values: dict[str, Tensor]
    channels: Tensor
    findings: list[Finding]

    def collapsing(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads that collapse on any prompt, the fastest growing first."""
        growth: dict[tuple[int, int], float] = {}
        for one in self.findings:
            if one.left:
                size = one.growth if math.isfinite(one.growth) else math.inf
                growth[one.layer, one.head] = max(size, growth.get((one.layer, one.head), 0.0))
        return sorted(growth, key=lambda pair: (-growth[pair], pair))

    def global_heads(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads that are global on any prompt."""
        return sorted({(one.layer, one.head) for one in self.findings if one.retention > GLOBAL})

    def retention_is_defined(self) -> bool:
        """Whether retention, which defines global heads, exists for this model."""
        return not math.isnan(self.findings[0].retention)


def diagnose(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    train_length: int,
    output: Path,
    checkpoint: str = "",
    quiet: bool = False,
) -> Diagnosis:
    """Reads prompts and diagnoses every head.

    Args:
        model: with cells of longrnn, with or without a mitigation.
        prompts: all of one length.
        train_length: training length in tokens.
        output: a folder; `states.jsonl` (one row per layer, head, prompt and position) and
            `diagnosis.yaml` are written there at the end.
        checkpoint: name of the checkpoint, for the record.
        quiet: show no progress.

    Raises:
        UserError: the length does not exceed the training length, the model has no readable
            states, or logits are not finite inside the training length.
    """
    length = len(prompts[0].tokens)
    if length <= train_length:
        raise UserError(
            f"collapse shows beyond the training length of {format_length(train_length)}: "
            f"give a --length above it, not {format_length(length)}"
        )
    every, first = max(EVERY, length // MOST), min(FIRST, train_length)
    names = [one.name for one in prompts]
    prompts = [
        one._replace(name=f"{one.name} ({one.sha256[:8]})") if names.count(one.name) > 1 else one
        for one in prompts
    ]
    tokens = torch.stack([one.tokens for one in prompts])
    # A state that overflows beyond the training length is a finding; inside, the model is broken.
    inside = tokens[:, :train_length].to(model.init_state(1).position.device)
    refuse_nonfinite(model(inside, keep=1).logits, model, inside)
    stops = _stops(length, train_length, every)
    series: dict[str, list[Tensor]] = {name: [] for name in (*PER_HEAD, "loss")}
    channels = []
    with Progress("states", tokens.numel(), unit="tokens", quiet=quiet) as progress:
        for one in observe(model, tokens, stops, first=first, progress=progress):
            for name in PER_HEAD:
                series[name].append(torch.stack([getattr(layer, name) for layer in one.layers]))
            series["loss"].append(one.loss)
            if one.position in (train_length, length):
                channels.append(torch.stack([layer.channels for layer in one.layers]))
    values = {name: torch.stack(found) for name, found in series.items()}
    values["output_norm"] = values["output_norm"][..., None].expand_as(values["norm"])
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
        "prompts": [{"name": p.name, "sha256": p.sha256, "tokens": length} for p in prompts],
    }
    findings = find(stops, values, train_length)
    found = Diagnosis(about, list(prompts), stops, values, torch.stack(channels), findings)
    write_atomic(output / "states.jsonl", "".join(json.dumps(row) + "\n" for row in _rows(found)))
    write_atomic(output / "diagnosis.yaml", _yaml(found))
    return found


def text_prompt(document: Document, length: int) -> Prompt:
    """Returns the first `length` tokens of a text.

    Raises:
        UserError: the text is shorter.
    """
    if len(document.tokens) < length:
        raise UserError(
            f"{document.name} has {len(document.tokens):,} tokens and {length:,} are needed: "
            "give a longer text or a smaller --length"
        )
    return Prompt(document.name, document.sha256, document.tokens[:length])


def newlines(tokenizer: Tokenizer, length: int) -> Prompt:
    """Returns a prompt of newlines only.

    Raises:
        UserError: the tokenizer has no newline.
    """
    document = texts.newlines(tokenizer, length)
    return Prompt(document.name, document.sha256, document.tokens[:length])


def _stops(length: int, train_length: int, every: int) -> list[int]:
    """Returns the positions of observations: every so many tokens, and at least INSIDE inside."""
    dense = min(every, max(1, train_length // INSIDE))
    inside = range(dense, train_length + 1, dense)
    return sorted({*inside, *range(every, length + 1, every), train_length, length})


def _rows(found: Diagnosis) -> Iterator[dict[str, Any]]:
    """Yields one row per position, layer, prompt and head; values that are not finite are null."""
    losses = found.values["loss"].tolist()
    lists = {name: found.values[name].tolist() for name in PER_HEAD}
    shape = found.values["norm"].shape
    for at, layer, prompt, head in product(*map(range, shape)):
        yield {
            "layer": layer,
            "head": head,
            "prompt": found.prompts[prompt].name,
            "position": found.positions[at],
            **{name: _finite(lists[name][at][layer][prompt][head]) for name in PER_HEAD},
            "loss": _finite(losses[at][prompt]),
        }


def _yaml(found: Diagnosis) -> str:
    evidence = [
        {
            "layer": one.layer,
            "head": one.head,
            "prompt": found.prompts[one.prompt].name,
            "left": list(one.left),
            "onset": one.onset,
            "growth": _finite(one.growth),
        }
        for one in found.findings
        if one.left
    ]
    content = {
        **found.about,
        "collapsing": [list(pair) for pair in sorted(found.collapsing())],
        "global": [list(pair) for pair in found.global_heads()],
        "evidence": evidence,
    }
    return yaml_text(content, default_flow_style=None, width=100, allow_unicode=True)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
