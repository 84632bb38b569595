"""Calibrates the thresholds and factors of mitigations on text.

Notable choices:
- Parameters are either taken from statistics of a few windows of the training length, or searched
  without gradients, by the loss on windows of the target length.
- A method is one function in `METHODS`. It returns the mapping from which `mitigation` builds, so
  that calibrated files and hand-written ones have the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longrnn.diagnostics.layer_statistics import GLOBAL, Job
from longrnn.diagnostics.per_head import per_head
from longrnn.diagnostics.settings import Settings
from longrnn.errors import UserError, nearest
from longrnn.evaluation.perplexity import losses
from longrnn.evaluation.texts import Document
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.mitigations.bind import check_defined
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.seeds import seeded
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.units import format_length


def calibrate(
    model: LanguageModel,
    documents: Sequence[Document],
    method: str,
    settings: Settings,
    *,
    tokenizer: Tokenizer | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Calibrate one method.

    Args:
        model: a model with recurrent layers.
        documents: texts that are not used for evaluation.
        method: a key of `METHODS`.
        settings: see `Settings`.
        tokenizer: that of the documents; bytes by default.
        quiet: show no progress.

    Returns:
        Mappings with `kind` and options, of which `mitigation` makes one mitigation.

    Raises:
        UserError: the method is unknown or not defined for the model, or a text is too short.
    """
    if method not in METHODS:
        raise UserError(f"{method!r} cannot be calibrated: {nearest(method, METHODS)}")
    settings.check()
    _refuse_unread(method, settings)
    if method in MITIGATIONS:
        check_defined(MITIGATIONS[method], type(model.cells[0]))
    return METHODS[method](Job(model, documents, settings, tokenizer or ByteTokenizer(), quiet))


def _state_norm(job: Job) -> list[dict[str, Any]]:
    """Return as threshold the largest state norm of each head, times the margin."""
    thresholds = [layer.largest_norms(job.settings.margin) for layer in job.inside()]
    for index, layer in enumerate(thresholds):
        if min(layer) <= 0:
            raise UserError(
                f"a head of layer {index} has a state of zeros on this text: give more text"
            )
    return [{"kind": "state_norm", "threshold": thresholds}]


def _token_filter(job: Job) -> list[dict[str, Any]]:
    """Return as threshold of the global heads a quantile of their step sizes; None for others."""
    share = job.settings.filtered()
    thresholds = []
    for layer in job.inside():
        pairs = zip(layer.retention().tolist(), layer.step_quantiles(share), strict=True)
        thresholds.append([theta if kept > GLOBAL else None for kept, theta in pairs])
    if all(theta is None for layer in thresholds for theta in layer):
        raise UserError(
            f"no head keeps more than {GLOBAL} of its first token over "
            f"{format_length(job.settings.trained())} tokens, so there is nothing to filter: use "
            "another method"
        )
    return [{"kind": "token_filter", "threshold": thresholds}]


def _scale_delta(job: Job) -> list[dict[str, Any]]:
    """Return one factor per layer by search; with `share`, one for the far-reaching heads."""
    settings = job.settings
    if settings.share is None:
        return _search("scale_delta", job)
    reach = []
    for layer in job.inside():
        assert layer.log_decay is not None
        reach.append(-1 / layer.log_decay.flatten(0, 1).mean(0).clamp(max=-1e-12))
    count = max(1, round(settings.share * sum(len(layer) for layer in reach)))
    least = torch.cat(reach).topk(count).values[-1]
    factor = settings.trained() / settings.target()
    scale = [[factor if far >= least else 1.0 for far in layer] for layer in reach]
    return [{"kind": "scale_delta", "scale": scale}]


def _search(kind: str, job: Job) -> list[dict[str, Any]]:
    """Search log factors, one per layer, by simultaneous perturbation stochastic approximation.

    The gains fall as (k + 1 + A)^−0.602 and (k + 1)^−0.101 (Spall, 1998), as in MambaExtend
    (ICLR 2025, LgzRo1RpLS). The result is the best of all factors that were evaluated, the initial
    ones of 1 included.
    """
    settings = job.settings
    tokens = job.windows(settings.target() + 1)
    layers = len(job.model.cells)
    generator = seeded(settings.seed)

    def loss(logs: Tensor) -> float:
        factors = [round(value, 6) for value in logs.exp().tolist()]
        mitigated = job.model.under(mitigation({"kind": kind, "scale": factors}))
        edges = torch.tensor([[0, tokens.shape[1] - 1]]).repeat(len(tokens), 1)
        total = losses(mitigated, tokens, edges)
        return float(total.sum() / (tokens.numel() - len(tokens)))

    logs = torch.zeros(layers, dtype=torch.float64)
    best, least = logs, loss(logs)
    stability = settings.steps / 10
    with Progress("search", settings.steps, unit="steps", quiet=job.quiet) as progress:
        for k in range(settings.steps):
            signs = torch.randint(2, (layers,), generator=generator).double() * 2 - 1
            width = 0.2 / (k + 1) ** 0.101
            sides = [logs + width * signs, logs - width * signs]
            values = [loss(side) for side in sides]
            for side, value in zip(sides, values, strict=True):
                if value < least:
                    best, least = side, value
            slope = (values[0] - values[1]) / (2 * width)
            gain = 0.5 * ((1 + stability) / (k + 1 + stability)) ** 0.602
            # A step is at most one width, because the loss may be steep beyond the training length.
            logs = logs - (gain * slope * signs).clamp(-width, width)
            progress.advance(1, 1, f"loss {least:.4f}")
    return [{"kind": kind, "scale": [round(value, 6) for value in best.exp().tolist()]}]


# The methods that read a setting, where not all do.
READERS = {
    "margin": ("state_norm", "per_head"),
    "quantile": ("token_filter", "per_head"),
    "share": ("scale_delta",),
    "keys": ("per_head",),
    "passes": ("per_head",),
}

METHODS: dict[str, Callable[[Job], list[dict[str, Any]]]] = {
    "state_norm": _state_norm,
    "token_filter": _token_filter,
    "scale_delta": _scale_delta,
    "scale_decay": partial(_search, "scale_decay"),
    "power_decay": partial(_search, "power_decay"),
    "per_head": per_head,
}


def _refuse_unread(method: str, settings: Settings) -> None:
    """Raise a UserError for a setting that the method does not read."""
    for name in settings.model_fields_set:
        readers = READERS.get(name, (method,))
        if method not in readers:
            raise UserError(
                f"{name} is an option of {' and '.join(readers)}, and {method} does not read it: "
                "leave it out"
            )
