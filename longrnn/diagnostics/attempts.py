"""What a repair tries, cheapest first."""

from typing import NamedTuple

from longrnn.diagnostics.calibrate import calibrate
from longrnn.diagnostics.job import METHODS, STRICT, Job, Members
from longrnn.mitigations.spec import parse

# Passes over its windows and prompts in which a choice per head finds something, and at most.
LEAST_PASSES, MOST_PASSES = 5, 60


class Attempt(NamedTuple):
    """A mitigation, or a method of `calibrate`, on the plain model or on top of another attempt.

    Attributes:
        spec: the mitigation or the method; `filled` fills in the names in braces.
        may_fold: whether weights can express the result in some cells.
        base: the name of the attempt that it builds on; empty for the plain model.
    """

    spec: str
    may_fold: bool = False
    base: str = ""

    def filled(self, job: Job, keys: int, passes: int = LEAST_PASSES) -> str:
        """Return the specification for what is repaired."""
        trained, strict = job.train_length, job.share(left=STRICT)
        keep = 1 - 1 / trained
        return self.spec.format(trained=trained, keep=keep, strict=strict, keys=keys, passes=passes)

    def tokens(self, job: Job, keys: int) -> float:
        """Return about how many tokens it reads, counted without gradients."""
        name, options = parse(self.filled(job, keys))
        return METHODS.build({"kind": name, **options}).tokens(job) if name in METHODS else 0.0

    def make(self, job: Job, base: Members, keys: int, tokens: float) -> Members:
        """Return the mappings of which `mitigation` makes the whole mitigation.

        Args:
            job: what is repaired.
            base: the mappings of `base`.
            keys: prompts with a key that calibrations read.
            tokens: that it may read.
        """
        passes = min(MOST_PASSES, int(tokens / ((1 + keys) * job.target_length)))
        spec = self.filled(job, keys, passes)
        name, options = parse(spec)
        if name in METHODS:
            return [*base, *calibrate(job.under(base), spec)]
        return [*base, {"kind": name, **options}]


PER_HEAD = Attempt("per_head(windows=1, quantile={strict}, keys={keys}, passes={passes})")
ATTEMPTS = {
    "forget_more": Attempt("forget_more(decay_scale={keep}, input_scale=1)"),
    "sliding_window": Attempt("sliding_window(window={trained})"),
    "state_norm": Attempt("state_norm"),
    "token_filter": Attempt("token_filter"),
    "scale_decay": Attempt("scale_decay(windows=1, steps=10)", may_fold=True),
    "fit": Attempt("fit(steps=300, rows=4, keys={keys})", may_fold=True),
    "select": Attempt("fit(steps=600, rows=4, keys={keys}, select=true)", may_fold=True),
    "fit + token_filter": Attempt("token_filter", base="fit"),
    "fit + strict token_filter": Attempt("token_filter(quantile={strict})", base="fit"),
    "per_head": PER_HEAD,
    "fit + per_head": PER_HEAD._replace(base="fit"),
}
