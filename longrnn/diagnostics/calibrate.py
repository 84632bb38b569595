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
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveFloat
from scipy.optimize import minimize

from longrnn.diagnostics.fit import fit_time_scales
from longrnn.diagnostics.job import METHODS, Job, Members
from longrnn.diagnostics.per_head import keyed_prompts, search
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.mitigations.bind import check_defined
from longrnn.mitigations.spec import parse
from longrnn.models.finite import refuse_nonfinite
from longrnn.options import Count, Share
from longrnn.progress import Progress
from longrnn.units import format_length


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
    return chosen.run(job)


@METHODS.register("state_norm")
@dataclass(kw_only=True)
class LargestNorm:
    """The threshold is the largest norm of each head's state, times the margin."""

    windows: Count = 32
    margin: PositiveFloat = 1.0

    def run(self, job: Job) -> Members:
        norms = self.margin * job.inside(self.windows).norms
        return [{"kind": "state_norm", "threshold": norms.tolist()}]


@METHODS.register("token_filter")
@dataclass(kw_only=True)
class StepQuantile:
    """The threshold of the global heads is a quantile of their steps."""

    windows: Count = 32
    quantile: Share | None = None

    def run(self, job: Job) -> Members:
        inside = job.inside(self.windows)
        heads = [list(head) for head in sorted(inside.global_heads())]
        thresholds = inside.step_quantiles(job.share(self.quantile))
        return [{"kind": "token_filter", "threshold": thresholds, "heads": heads}]


@dataclass(kw_only=True)
class FactorSearch:
    """Search factors, one per layer, by COBYLA over their logarithms.

    Published for the steps of Mamba in MambaExtend (ICLR 2025, LgzRo1RpLS), with another search.
    The result is the best of all factors that were evaluated, the initial ones of 1 included.

    Attributes:
        windows: the maximum number of windows of the target length.
        steps: evaluations after the first ones, which change one layer each.
    """

    kind: ClassVar[str]
    windows: Count = 32
    steps: Count = 30

    def run(self, job: Job) -> Members:
        device = job.model.init_state(1).position.device
        tokens = job.windows(job.target_length + 1, self.windows).to(device)
        layers = len(job.model.cells)
        most = layers + 1 + self.steps
        tried: list[tuple[float, dict[str, Any]]] = []

        def loss(logs: np.ndarray) -> float:
            member = {"kind": self.kind, "scale": np.exp(logs).tolist()}
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


@METHODS.register("scale_delta")
class StepFactors(FactorSearch):
    kind = "scale_delta"


@METHODS.register("scale_decay")
class DecayFactors(FactorSearch):
    kind = "scale_decay"


@METHODS.register("power_decay")
class DecayPowers(FactorSearch):
    kind = "power_decay"


@METHODS.register("fit")
@dataclass(kw_only=True)
class TimeScaleFit:
    """Additions to the weights that set time scales, by gradients; see `fit_time_scales`.

    Attributes:
        steps: of the optimizer.
        rows: streams of text that are read at once.
        keys: rows of documents with a passkey that are read beside them.
        learning_rate: of the additions to log |A|; that of biases is half of it.
    """

    steps: Count = 300
    rows: Count = 4
    keys: Annotated[int, Field(ge=0)] = 0
    learning_rate: PositiveFloat = 0.05

    def run(self, job: Job) -> Members:
        settings = vars(self)
        with Progress("fit", self.steps, unit="tokens", quiet=job.quiet) as progress:
            return fit_time_scales(job, **settings, progress=progress)


@METHODS.register("per_head")
@dataclass(kw_only=True)
class PerHeadChoice:
    """One member per choice that any head has, with these heads.

    Attributes:
        windows: the maximum number of windows of text of the target length.
        quantile: share of tokens that `token_filter` leaves out.
        keys: passkey prompts of the target length whose answers count beside the loss of the text.
        passes: the maximum number of passes over all windows and prompts.
    """

    windows: Count = 32
    quantile: Share | None = None
    keys: Annotated[int, Field(ge=0)] = 0
    passes: Annotated[int, Field(ge=5)] = 300

    def run(self, job: Job) -> Members:
        trained, length = job.train_length, job.target_length + 1
        # As many tokens as the search reads.
        inside = job.inside(self.windows * job.target_length // trained)
        heads = inside.global_heads()
        # The mildest first.
        options: dict[str, dict[str, Any]] = {
            "none": {},
            "token_filter": {"threshold": inside.step_quantiles(job.share(self.quantile))},
            "state_norm": {"threshold": inside.norms.tolist()},
            "forget_more": {"decay_scale": 1 - 1 / trained, "input_scale": 1.0},
            "sliding_window": {"window": trained},
        }
        cell = type(job.model.cells[0])
        options = {k: v for k, v in options.items() if MITIGATIONS[k].undefined(cell) is None}
        texts = job.windows(length, self.windows)
        pages = job.windows(length, self.keys) if self.keys else texts[:0]
        rows, targets = keyed_prompts(texts, pages, job.tokenizer)
        with Progress("per head", self.passes, unit="tokens", quiet=job.quiet) as progress:
            return search(job.model, rows, targets, options, heads, self.passes, progress)
