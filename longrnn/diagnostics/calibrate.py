"""Calibrates the thresholds and factors of mitigations on text.

Notable choices:
- Parameters are either taken from observations of a few windows of the training length, or searched
  without gradients, by the loss on windows of the target length.
- A method is a dataclass in `METHODS`, whose fields are its settings. It returns the mappings from
  which `mitigation` builds, so that calibrated files and hand-written ones have the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from pydantic import PositiveFloat
from scipy.optimize import minimize

from longrnn.diagnostics.fit import TimeScaleFit
from longrnn.diagnostics.job import METHODS, Job, Members
from longrnn.diagnostics.per_head import PerHeadChoice
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.mitigations.bind import check_defined
from longrnn.mitigations.spec import parse
from longrnn.models.finite import refuse_nonfinite
from longrnn.options import Count, Share
from longrnn.progress import Progress
from longrnn.units import format_length

__all__ = ["METHODS", "PerHeadChoice", "TimeScaleFit", "calibrate"]


def calibrate(job: Job, method: str) -> Members:
    """Calibrate one method.

    Args:
        job: the model and the texts; all methods but state_norm need a target length.
        method: a key of `METHODS`, with its settings as in `state_norm(margin=0.7)`.

    Returns:
        Mappings with `kind` and options, of which `mitigation` makes one mitigation.

    Raises:
        UserError: the method or a setting is unknown, or not defined for the model, or a text is
            too short.
    """
    name, settings = parse(method)
    chosen = METHODS.build({"kind": name, **settings})
    if name != "state_norm" and job.target_length <= job.train_length:
        raise UserError(
            f"{name} needs a --target-length above the training length "
            f"{format_length(job.train_length)}: give the length that the model should reach"
        )
    if name in MITIGATIONS:
        check_defined(MITIGATIONS[name], type(job.model.cells[0]))
    return chosen.run(job, name)


@METHODS.register("state_norm")
@dataclass(kw_only=True)
class LargestNorm:
    """The threshold is the largest norm of each head's state, times the margin."""

    windows: Count = 32
    margin: PositiveFloat = 1.0

    def run(self, job: Job, kind: str) -> Members:
        norms = self.margin * job.inside(self.windows).norms
        return [{"kind": kind, "threshold": norms.tolist()}]


@METHODS.register("token_filter")
@dataclass(kw_only=True)
class StepQuantile:
    """The threshold of the global heads is a quantile of their steps."""

    windows: Count = 32
    quantile: Share | None = None

    def run(self, job: Job, kind: str) -> Members:
        inside = job.inside(self.windows)
        heads = [list(head) for head in sorted(inside.global_heads())]
        thresholds = inside.step_quantiles(job.share(self.quantile))
        return [{"kind": kind, "threshold": thresholds, "heads": heads}]


@METHODS.register("scale_delta")
@METHODS.register("scale_decay")
@METHODS.register("power_decay")
@dataclass(kw_only=True)
class FactorSearch:
    """Search factors, one per layer, by COBYLA over their logarithms.

    Published for the steps of Mamba in MambaExtend (ICLR 2025, LgzRo1RpLS), with another search.
    The result is the best of all factors that were evaluated, the initial ones of 1 included.

    Attributes:
        windows: the maximum number of windows of the target length.
        steps: evaluations after the first ones, which change one layer each.
    """

    windows: Count = 32
    steps: Count = 30

    def run(self, job: Job, kind: str) -> Members:
        device = job.model.init_state(1).position.device
        tokens = job.windows(job.target_length + 1, self.windows).to(device)
        layers = len(job.model.cells)
        most = layers + 1 + self.steps
        tried: list[tuple[float, dict[str, Any]]] = []

        def loss(logs: np.ndarray) -> float:
            member = {"kind": kind, "scale": np.exp(logs).tolist()}
            mitigated = job.model.under(mitigation(member))
            nats, _ = mitigated.token_losses(tokens[:, :-1], tokens[:, 1:])
            refuse_nonfinite(nats, mitigated, tokens)
            tried.append((float(nats.double().mean()), member))
            progress.advance(1, 1, f"loss {min(value for value, _ in tried):.4f}")
            return tried[-1][0]

        with Progress("search", most, unit="steps", quiet=job.quiet) as progress:
            options = {"maxiter": most, "rhobeg": 0.2}
            minimize(loss, np.zeros(layers), method="COBYLA", options=options)
        return [min(tried, key=itemgetter(0))[1]]
