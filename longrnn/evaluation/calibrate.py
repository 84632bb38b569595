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

from longrnn.errors import UserError, nearest
from longrnn.evaluation.layer_statistics import statistics
from longrnn.evaluation.perplexity import losses
from longrnn.evaluation.settings import Settings
from longrnn.evaluation.texts import Document
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.mitigations.bind import check_defined
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.seeds import seeded
from longrnn.units import format_length

# A head is global if it retains more than this share of its first token at the end of the training
# length (arXiv 2504.16053).
GLOBAL = 0.05


def calibrate(
    model: LanguageModel,
    documents: Sequence[Document],
    method: str,
    settings: Settings,
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """Calibrate one method.

    Args:
        model: a model with recurrent layers.
        documents: texts that are not used for evaluation.
        method: a key of `METHODS`.
        settings: see `Settings`.
        quiet: show no progress.

    Returns:
        A mapping with `kind` and options, from which `mitigation` builds the method.

    Raises:
        UserError: the method is unknown or not defined for the model, or a text is too short.
    """
    if method not in METHODS:
        raise UserError(f"{method!r} cannot be calibrated: {nearest(method, METHODS)}")
    settings.check()
    _refuse_unread(method, settings)
    check_defined(MITIGATIONS[method], type(model.cells[0]))
    return METHODS[method](model, documents, settings, quiet)


def _state_norm(
    model: LanguageModel, documents: Sequence[Document], settings: Settings, quiet: bool
) -> dict[str, Any]:
    """Return as threshold the largest state norm of each head, times the margin."""
    found = statistics(model, _windows(documents, settings.trained(), settings.windows), quiet)
    thresholds = [settings.margin * layer.norms.flatten(0, 1).amax(0) for layer in found]
    for index, threshold in enumerate(thresholds):
        if bool((threshold <= 0).any()):
            raise UserError(
                f"a head of layer {index} has a state of zeros on this text: give more text"
            )
    return {"kind": "state_norm", "threshold": [_rounded(values) for values in thresholds]}


def _token_filter(
    model: LanguageModel, documents: Sequence[Document], settings: Settings, quiet: bool
) -> dict[str, Any]:
    """Return as threshold of the global heads a quantile of their step sizes; None for others."""
    found = statistics(model, _windows(documents, settings.trained(), settings.windows), quiet)
    share = settings.quantile
    if share is None:
        share = 1 - settings.trained() / settings.target()
    thresholds = []
    for layer in found:
        assert layer.log_decay is not None
        assert layer.dt is not None
        retention = layer.log_decay.sum(1).mean(0).exp()
        # Head by head: `quantile` accepts at most 16 million numbers.
        limit = torch.stack([dt.quantile(share) for dt in layer.dt.flatten(0, 1).unbind(1)])
        # Rounded up, so that the step size that equals the quantile is below the threshold.
        pairs = zip(retention.tolist(), (limit * (1 + 1e-6)).tolist(), strict=True)
        thresholds.append([theta if kept > GLOBAL else None for kept, theta in pairs])
    if all(theta is None for layer in thresholds for theta in layer):
        raise UserError(
            f"no head keeps more than {GLOBAL} of its first token over "
            f"{format_length(settings.trained())} tokens, so there is nothing to filter: use "
            "another method"
        )
    return {"kind": "token_filter", "threshold": thresholds}


def _scale_delta(
    model: LanguageModel, documents: Sequence[Document], settings: Settings, quiet: bool
) -> dict[str, Any]:
    """Return one factor per layer by search; with `share`, one for the far-reaching heads."""
    if settings.share is None:
        return _search("scale_delta", model, documents, settings, quiet)
    windows = _windows(documents, settings.trained(), settings.windows)
    reach = []
    for layer in statistics(model, windows, quiet):
        assert layer.log_decay is not None
        reach.append(-1 / layer.log_decay.flatten(0, 1).mean(0).clamp(max=-1e-12))
    count = max(1, round(settings.share * sum(len(layer) for layer in reach)))
    least = torch.cat(reach).topk(count).values[-1]
    factor = settings.trained() / settings.target()
    return {
        "kind": "scale_delta",
        "scale": [[factor if far >= least else 1.0 for far in layer] for layer in reach],
    }


def _search(
    kind: str, model: LanguageModel, documents: Sequence[Document], settings: Settings, quiet: bool
) -> dict[str, Any]:
    """Search log factors, one per layer, by simultaneous perturbation stochastic approximation.

    The gains fall as (k + 1 + A)^−0.602 and (k + 1)^−0.101 (Spall, 1998), as in MambaExtend
    (ICLR 2025, LgzRo1RpLS). The result is the best of all factors that were evaluated, the initial
    ones of 1 included.
    """
    target = settings.target()
    windows = _windows(documents, target + 1, settings.windows)
    layers = len(model.cells)
    generator = seeded(settings.seed)

    def loss(logs: Tensor) -> float:
        factors = [round(value, 6) for value in logs.exp().tolist()]
        mitigated = model.under(mitigation({"kind": kind, "scale": factors}))
        edges = torch.tensor([[0, windows.shape[1] - 1]]).repeat(len(windows), 1)
        total = losses(mitigated, windows, edges)
        return float(total.sum() / (windows.numel() - len(windows)))

    logs = torch.zeros(layers, dtype=torch.float64)
    best, least = logs, loss(logs)
    stability = settings.steps / 10
    with Progress("search", settings.steps, unit="steps", quiet=quiet) as progress:
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
    return {"kind": kind, "scale": [round(value, 6) for value in best.exp().tolist()]}


# Settings that change the numbers of one method, and that no other method reads.
OF_ONE_METHOD = {"margin": "state_norm", "quantile": "token_filter", "share": "scale_delta"}

METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "state_norm": _state_norm,
    "token_filter": _token_filter,
    "scale_delta": _scale_delta,
    "scale_decay": partial(_search, "scale_decay"),
    "power_decay": partial(_search, "power_decay"),
}


def _refuse_unread(method: str, settings: Settings) -> None:
    """Raise a UserError for a setting that the method does not read."""
    for name in settings.model_fields_set:
        reader = OF_ONE_METHOD.get(name, method)
        if reader != method:
            raise UserError(
                f"{name} is an option of {reader}, and {method} does not read it: leave it out"
            )


def _windows(documents: Sequence[Document], length: int, most: int) -> Tensor:
    """Return at most `most` disjoint windows, `(w, length)`, spread evenly over the texts."""
    starts = [
        (document, start)
        for document in documents
        for start in range(0, len(document.tokens) - length + 1, length)
    ]
    if not starts:
        longest = max((len(document.tokens) for document in documents), default=0)
        raise UserError(
            f"the longest text has {longest:,} tokens and a window needs {length:,}: give more text"
        )
    chosen = (
        [starts[i * len(starts) // most] for i in range(most)] if len(starts) > most else starts
    )
    return torch.stack([document.tokens[start : start + length] for document, start in chosen])


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
