"""Calibrates the thresholds and factors of mitigations on text, and chooses one per head.

Notable choices:
- Parameters are either taken from observations of a few windows of the training length, or searched
  without gradients, by the loss on windows of the target length.
- A method is a class in `METHODS`, whose fields are its settings. It returns the mappings from
  which `mitigation` builds, so that calibrated files and hand-written ones have the same form.
- The choice per head is the mildest that the measured loss beyond the training length permits:
  nats per token of texts of the target length, plus nats per token of the answers to passkey
  prompts of that length in the same texts.
- Heads act together: to limit one repairs nothing while others collapse. The search therefore
  starts from the best choice for all heads alike, then visits whole layers, and then single heads,
  the longest memory first, until no head changes or `passes` are spent. A single head is offered
  `none` and what other heads have by then.
"""

import math
import random
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, PositiveFloat
from scipy.optimize import minimize
from torch import Tensor

from longrnn.data.batch import UNSCORED
from longrnn.data.prompts import PasskeyPrompts, draw_needles
from longrnn.diagnostics.fit import TimeScaleFit
from longrnn.diagnostics.job import METHODS, Job, Members
from longrnn.errors import UserError
from longrnn.evaluation.texts import text_of
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.mitigations.bind import check_defined
from longrnn.mitigations.spec import parse
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite, refuse_nonfinite
from longrnn.options import Count, Options, Share
from longrnn.progress import Progress
from longrnn.text import Tokenizer
from longrnn.units import format_length

__all__ = ["METHODS", "TimeScaleFit", "calibrate"]

# A milder choice is taken unless its objective is above the least one by more than this, in nats.
OBJECTIVE_TOLERANCE = 0.002

Head = tuple[int, int]
Chosen = dict[Head, str]


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


class Observation(Options):
    """Takes parameters from what is observed in windows of the training length."""

    windows: Count = 32

    def tokens(self, job: Job) -> float:
        return self.windows * job.train_length


@METHODS.register("state_norm")
class LargestNorm(Observation):
    """The threshold is the largest norm of each head's state, times the margin."""

    margin: PositiveFloat = 1.0

    def run(self, job: Job, kind: str) -> Members:
        norms = self.margin * job.inside(self.windows).norms
        return [{"kind": kind, "threshold": norms.tolist()}]


@METHODS.register("token_filter")
class StepQuantile(Observation):
    """The threshold of the global heads is a quantile of their steps."""

    quantile: Share | None = None

    def run(self, job: Job, kind: str) -> Members:
        inside = job.inside(self.windows)
        heads = [list(head) for head in sorted(inside.global_heads())]
        thresholds = inside.step_quantiles(job.share(self.quantile))
        return [{"kind": kind, "threshold": thresholds, "heads": heads}]


@METHODS.register("scale_delta")
@METHODS.register("scale_decay")
@METHODS.register("power_decay")
class FactorSearch(Options):
    """Search factors, one per layer, by COBYLA over their logarithms.

    Published for the steps of Mamba in MambaExtend (ICLR 2025, LgzRo1RpLS), with another search.
    The result is the best of all factors that were evaluated, the initial ones of 1 included.

    Attributes:
        windows: the maximum number of windows of the target length.
        steps: evaluations after the first ones, which change one layer each.
    """

    windows: Count = 32
    steps: Count = 30

    def evaluations(self, job: Job) -> int:
        """Return how many losses are computed at most."""
        return len(job.model.cells) + 1 + self.steps

    def tokens(self, job: Job) -> float:
        return self.evaluations(job) * self.windows * job.target_length

    def run(self, job: Job, kind: str) -> Members:
        device = job.model.init_state(1).position.device
        tokens = job.windows(job.target_length + 1, self.windows).to(device)
        most = self.evaluations(job)
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
            minimize(loss, np.zeros(len(job.model.cells)), method="COBYLA", options=options)
        return [min(tried, key=itemgetter(0))[1]]


@METHODS.register("per_head")
class PerHeadChoice(Options):
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

    def tokens(self, job: Job) -> float:
        return self.passes * (self.windows + self.keys) * job.target_length

    def run(self, job: Job, _: str) -> Members:
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


def search(
    model: LanguageModel,
    rows: Tensor,
    targets: Tensor,
    options: Mapping[str, dict[str, Any]],
    heads: Sequence[Head],
    passes: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Find a choice for every head.

    Args:
        model: without mitigation.
        rows: `(b, t)` tokens.
        targets: `(b, t)`, the tokens after them, UNSCORED where they do not count.
        options: of each choice, the mildest first, which is none.
        heads: (layer, head), the longest memory first.
        passes: the maximum number of passes over `rows`.
        progress: counts the passes.

    Returns:
        The mappings of which `mitigation` makes one mitigation.
    """
    device = model.init_state(1).position.device
    rows, targets = rows.to(device), targets.to(device)
    scored = targets != UNSCORED
    is_text = scored.all(1)
    known: dict[tuple[str, ...], float] = {}

    def objective(chosen: Chosen) -> float:
        """The loss in nats, per token of text and per token of the answers, added up."""
        key = tuple(chosen.values())
        if key not in known:
            nats, _ = model.under(mitigation(members(options, chosen))).token_losses(rows, targets)
            total = sum(
                float(nats[kind].double().sum() / scored[kind].sum())
                for kind in (is_text, ~is_text)
                if kind.any()
            )
            known[key] = total if math.isfinite(total) else math.inf
            plain, least = next(iter(known.values())), min(known.values())
            progress.advance(1, rows.numel(), f"loss {plain:.3f}, now {least:.3f}")
        return known[key]

    def choose(chosen: Chosen, group: Sequence[Head], offered: Sequence[str]) -> Chosen:
        """`chosen` with the mildest choice for a group of heads that is nearly the best."""
        tried = [chosen | dict.fromkeys(group, choice) for choice in offered]
        if len(known.keys() | {tuple(choice.values()) for choice in tried}) > passes:
            return chosen
        least = min(map(objective, tried))
        return next(one for one in tried if objective(one) <= least + OBJECTIVE_TOLERANCE)

    choices = list(options)
    chosen = choose(dict.fromkeys(heads, "none"), heads, choices)
    if not math.isfinite(objective(chosen)):
        explain_nonfinite(model, rows)
    for layer in sorted({layer for layer, _ in heads}):
        chosen = choose(chosen, [head for head in heads if head[0] == layer], choices)
    offered = [choice for choice in choices if choice in {"none", *chosen.values()}]
    previous: Chosen = {}
    while chosen != previous:
        previous = chosen
        for head in heads:
            chosen = choose(chosen, [head], offered)
    return members(options, chosen)


def members(options: Mapping[str, dict[str, Any]], chosen: Chosen) -> list[dict[str, Any]]:
    """Return one mapping per choice that any head has, with these heads."""
    mappings = []
    for choice in options:
        heads = [list(head) for head, taken in sorted(chosen.items()) if taken == choice]
        if heads and choice != "none":
            mappings.append({"kind": choice, **options[choice], "heads": heads})
    return mappings or [{"kind": "none"}]


def keyed_prompts(texts: Tensor, pages: Tensor, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return texts, then prompts with keys, and the targets, both `(b, t)`.

    A prompt is the header, text, one key line, text, the question and the answer. The keys are
    those of training, which no evaluation uses, and are spread evenly over the text.

    Args:
        texts: `(w, t + 1)`.
        pages: `(k, t + 1)`, the texts of the prompts.
        tokenizer: of both.
    """
    rows, targets, rng = [*texts], [row[1:] for row in texts], random.Random(0)
    for number, page in enumerate(pages):
        prompts = PasskeyPrompts(tokenizer, text_of(page, tokenizer), 1)
        needle = draw_needles(rng, 1)[0]._replace(depth=number / len(pages))
        answer = prompts.answer(needle)
        prompt = prompts.prompt_of([needle], 0, length=len(page) - len(answer))
        rows.append(torch.cat([prompt, answer]))
        targets.append(torch.cat([torch.full((len(prompt) - 1,), UNSCORED), answer]))
    return torch.stack(rows)[:, :-1], torch.stack(targets)
