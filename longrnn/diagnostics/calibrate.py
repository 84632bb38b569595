"""Calibrates the thresholds and factors of mitigations on text.

Notable choices:
- Parameters are either taken from observations of a few windows of the training length, or searched
  without gradients, by the loss on windows of the target length.
- A method is a dataclass in `METHODS`, whose fields are its settings. It returns the mappings from
  which `mitigation` builds, so that calibrated files and hand-written ones have the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from longrnn.diagnostics import per_head  # noqa: F401
from longrnn.diagnostics.calibration import METHODS, Job, Margin, Share
from longrnn.diagnostics.observe import GLOBAL
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.mitigations.bind import check_defined
from longrnn.mitigations.spec import parse
from longrnn.models import LanguageModel
from longrnn.models.finite import refuse_nonfinite
from longrnn.options import Count, Seed
from longrnn.progress import Progress
from longrnn.seeds import seeded
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.units import format_length


def calibrate(
    model: LanguageModel,
    documents: Sequence[Document],
    method: str,
    *,
    train_length: int,
    target_length: int | None = None,
    tokenizer: Tokenizer | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Calibrate one method.

    Args:
        model: a model with recurrent layers, without mitigation.
        documents: texts that are not used for evaluation.
        method: a key of `METHODS`, with its settings as in `state_norm(margin=0.7)`.
        train_length: length that the model was trained on, in tokens.
        target_length: length at which it should work; all methods but state_norm need it.
        tokenizer: that of the documents; bytes by default.
        quiet: show no progress.

    Returns:
        Mappings with `kind` and options, of which `mitigation` makes one mitigation.

    Raises:
        UserError: the method or a setting is unknown, or not defined for the model, or a text is
            too short.
    """
    name, settings = parse(method)
    chosen = METHODS.build({"kind": name, **settings})
    if target_length is not None and target_length <= train_length:
        raise UserError(
            f"the target length {format_length(target_length)} must be above the training length "
            f"{format_length(train_length)}: give a greater one"
        )
    if name in MITIGATIONS:
        check_defined(MITIGATIONS[name], type(model.cells[0]))
    own = tokenizer or ByteTokenizer()
    return chosen.run(Job(model, documents, train_length, target_length, own, quiet))


@METHODS.register("state_norm")
@dataclass(kw_only=True)
class StateNorm:
    """The threshold is the largest norm of each head's state, times the margin."""

    windows: Count = 32
    margin: Margin = 1.0

    def run(self, job: Job) -> list[dict[str, Any]]:
        thresholds = job.inside(self.windows).thresholds(self.margin)
        for index, layer in enumerate(thresholds):
            if min(layer) <= 0:
                raise UserError(
                    f"a head of layer {index} has a state of zeros on this text: give more text"
                )
        return [{"kind": "state_norm", "threshold": thresholds}]


@METHODS.register("token_filter")
@dataclass(kw_only=True)
class TokenFilter:
    """The threshold of the global heads is a quantile of their steps; others have none."""

    windows: Count = 32
    quantile: Share | None = None

    def run(self, job: Job) -> list[dict[str, Any]]:
        share = job.share(self.quantile)
        found = job.inside_global(self.windows)
        pairs = zip(found.retention.tolist(), found.step_quantiles(share), strict=True)
        thresholds = [
            [theta if kept > GLOBAL else None for kept, theta in zip(*layer, strict=True)]
            for layer in pairs
        ]
        return [{"kind": "token_filter", "threshold": thresholds}]


@dataclass(kw_only=True)
class Search:
    """Search log factors, one per layer, by simultaneous perturbation stochastic approximation.

    The gains fall as (k + 1 + A)^−0.602 and (k + 1)^−0.101 (Spall, 1998), as in MambaExtend
    (ICLR 2025, LgzRo1RpLS). The result is the best of all factors that were evaluated, the initial
    ones of 1 included.
    """

    kind: ClassVar[str]
    windows: Count = 32
    steps: Count = 30
    seed: Seed = 0

    def run(self, job: Job) -> list[dict[str, Any]]:
        device = job.model.init_state(1).position.device
        tokens = job.windows(job.target() + 1, self.windows).to(device)
        layers, generator = len(job.model.cells), seeded(self.seed)

        def loss(logs: Tensor) -> float:
            factors = [round(value, 6) for value in logs.exp().tolist()]
            mitigated = job.model.under(mitigation({"kind": self.kind, "scale": factors}))
            nats, _ = mitigated.token_losses(tokens[:, :-1], tokens[:, 1:])
            refuse_nonfinite(nats, mitigated, tokens)
            return float(nats.double().mean())

        logs = torch.zeros(layers, dtype=torch.float64)
        best, least = logs, loss(logs)
        stability = self.steps / 10
        with Progress("search", self.steps, unit="steps", quiet=job.quiet) as progress:
            for k in range(self.steps):
                signs = torch.randint(2, (layers,), generator=generator).double() * 2 - 1
                width = 0.2 / (k + 1) ** 0.101
                sides = [logs + width * signs, logs - width * signs]
                values = [loss(side) for side in sides]
                least, best = min(
                    [(least, best), *zip(values, sides, strict=True)], key=itemgetter(0)
                )
                slope = (values[0] - values[1]) / (2 * width)
                gain = 0.5 * ((1 + stability) / (k + 1 + stability)) ** 0.602
                # A step is at most one width: the loss may be steep beyond the training length.
                logs = logs - (gain * slope * signs).clamp(-width, width)
                progress.advance(1, 1, f"loss {least:.4f}")
        return [{"kind": self.kind, "scale": [round(value, 6) for value in best.exp().tolist()]}]


for _kind in ("scale_delta", "scale_decay", "power_decay"):
    METHODS.register(_kind)(type(_kind, (Search,), {"kind": _kind}))
