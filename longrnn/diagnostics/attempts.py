"""What a repair tries, cheapest first."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from longrnn.diagnostics.calibrate import calibrate
from longrnn.diagnostics.job import METHODS, Job, Members
from longrnn.mitigations.spec import parse

# A token with gradients costs as much as this many without.
GRADIENT_COST = 4
FIT_STEPS, FIT_ROWS, SEARCH_STEPS = 300, 4, 10
SELECT_STEPS = 600
# Passes over its windows and prompts in which a choice per head finds something, and at most.
LEAST_PASSES, MOST_PASSES = 5, 60


class Attempt(NamedTuple):
    """A mitigation, or a method of `calibrate`, on the plain model or on top of another attempt.

    Attributes:
        spec: the mitigation or the method; `make` fills in the names in braces.
        tokens: about how many tokens it reads, counted without gradients, with a number of keyed
            prompts.
        may_fold: whether weights can express the result in some cells.
        base: the name of the attempt that it builds on; empty for the plain model.
    """

    spec: str
    tokens: Callable[[Job, int], float] = lambda job, keys: 32 * job.train_length
    may_fold: bool = False
    base: str = ""

    def make(self, job: Job, base: Members, keys: int, tokens: float) -> Members:
        """Return the mappings of which `mitigation` makes the whole mitigation.

        Args:
            job: what is repaired.
            base: the mappings of `base`.
            keys: prompts with a key that calibrations read.
            tokens: that it may read.
        """
        trained, passes = job.train_length, min(MOST_PASSES, int(tokens / _pass_tokens(job, keys)))
        values = {"trained": trained, "keep": 1 - 1 / trained, "keys": keys}
        values["strict"] = job.strict_share
        spec = self.spec.format(**values, passes=passes)
        name, options = parse(spec)
        if name in METHODS:
            return [*base, *calibrate(job.under(base), spec)]
        return [*base, {"kind": name, **options}]


def _search_tokens(job: Job, _: int) -> float:
    return (len(job.model.cells) + 1 + SEARCH_STEPS) * job.target_length


def _fit_tokens(job: Job, keys: int, steps: int = FIT_STEPS) -> float:
    segment = max(job.train_length, job.target_length / steps)
    return GRADIENT_COST * steps * (FIT_ROWS + keys) * segment


def _pass_tokens(job: Job, keys: int) -> float:
    return (1 + keys) * job.target_length


PER_HEAD = Attempt(
    "per_head(windows=1, quantile={strict}, keys={keys}, passes={passes})",
    tokens=lambda job, keys: LEAST_PASSES * _pass_tokens(job, keys),
)
ATTEMPTS = {
    "forget_more": Attempt("forget_more(decay_scale={keep}, input_scale=1)"),
    "sliding_window": Attempt("sliding_window(window={trained})"),
    "state_norm": Attempt("state_norm"),
    "token_filter": Attempt("token_filter"),
    "scale_decay": Attempt(
        f"scale_decay(windows=1, steps={SEARCH_STEPS})", _search_tokens, may_fold=True
    ),
    "fit": Attempt(
        f"fit(steps={FIT_STEPS}, rows={FIT_ROWS}, keys={{keys}})", _fit_tokens, may_fold=True
    ),
    "select": Attempt(
        f"fit(steps={SELECT_STEPS}, rows={FIT_ROWS}, keys={{keys}}, select=true)",
        partial(_fit_tokens, steps=SELECT_STEPS),
        may_fold=True,
    ),
    "fit + token_filter": Attempt("token_filter", base="fit"),
    "fit + strict token_filter": Attempt("token_filter(quantile={strict})", base="fit"),
    "per_head": PER_HEAD,
    "fit + per_head": PER_HEAD._replace(base="fit"),
}
