"""What a repair tries, from cheap to dear, and how many tokens each reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from longrnn.diagnostics.calibrate import calibrate
from longrnn.diagnostics.job import Members
from longrnn.evaluation.texts import Document
from longrnn.mitigations.spec import parse
from longrnn.models import LanguageModel
from longrnn.text import Tokenizer

# A token of a step with gradients takes as long as so many tokens without.
GRADIENT_COST = 4
FIT_STEPS, FIT_ROWS, SEARCH_STEPS = 300, 4, 10
# Passes over its windows and prompts in which a choice per head finds something, and at most.
LEAST_PASSES, MOST_PASSES = 5, 60


class Setting(NamedTuple):
    """What is repaired.

    Attributes:
        model: without mitigation.
        tokenizer: of the model.
        documents: the texts to choose on.
        trained: training length in tokens.
        length: tokens up to which the model should work.
        keys: prompts with a key that calibrations read; 0 to ignore keys.
        quiet: show no progress.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    documents: Sequence[Document]
    trained: int
    length: int
    keys: int
    quiet: bool

    def under(self, members: Members) -> LanguageModel:
        """Return the model under a mitigation."""
        return self.model.under(members) if members else self.model

    @property
    def pass_tokens(self) -> int:
        """The tokens of one pass of a choice per head."""
        return (1 + self.keys) * self.length


class Attempt(NamedTuple):
    """A mitigation, or a method of `calibrate` on the plain model or on top of another attempt.

    Attributes:
        spec: the mitigation or the method; names in braces are filled in by `make`.
        is_method: which of the two.
        may_fold: whether weights can express the result in some cells.
        after: the name of the attempt that it builds on; empty for the plain model.
        tokens: about how many tokens it reads, counted without gradients.
    """

    spec: str
    is_method: bool = True
    may_fold: bool = False
    after: str = ""
    tokens: Callable[[Setting], float] = lambda setting: 32 * setting.trained

    def make(self, setting: Setting, base: Members, tokens: float) -> Members:
        """Return the mappings of which `mitigation` makes the whole mitigation.

        Args:
            setting: what is repaired.
            base: those of `after`.
            tokens: that it may read.
        """
        passes = min(MOST_PASSES, int(tokens / setting.pass_tokens))
        values = {"trained": setting.trained, "keep": 1 - 1 / setting.trained, "passes": passes}
        spec = self.spec.format(keys=setting.keys, **values)
        if not self.is_method:
            name, options = parse(spec)
            return [*base, {"kind": name, **options}]
        found = calibrate(
            setting.under(base),
            setting.documents,
            spec,
            train_length=setting.trained,
            target_length=setting.length,
            tokenizer=setting.tokenizer,
            quiet=setting.quiet,
        )
        return [*base, *found]


def _search_tokens(setting: Setting) -> float:
    return (len(setting.model.cells) + 1 + SEARCH_STEPS) * setting.length


def _fit_tokens(setting: Setting) -> float:
    segment = max(setting.trained, setting.length / FIT_STEPS)
    return GRADIENT_COST * FIT_STEPS * (FIT_ROWS + setting.keys) * segment


PER_HEAD = Attempt(
    "per_head(windows=1, keys={keys}, passes={passes})",
    tokens=lambda setting: LEAST_PASSES * setting.pass_tokens,
)
ATTEMPTS = {
    "forget_more": Attempt("forget_more(decay_scale={keep}, input_scale=1)", is_method=False),
    "sliding_window": Attempt("sliding_window(window={trained})", is_method=False),
    "state_norm": Attempt("state_norm"),
    "token_filter": Attempt("token_filter"),
    "scale_decay": Attempt(
        f"scale_decay(windows=1, steps={SEARCH_STEPS})", may_fold=True, tokens=_search_tokens
    ),
    "fit": Attempt(
        f"fit(steps={FIT_STEPS}, rows={FIT_ROWS}, keys={{keys}})", may_fold=True, tokens=_fit_tokens
    ),
    "fit + token_filter": Attempt("token_filter", after="fit"),
    "per_head": PER_HEAD,
    "fit + per_head": PER_HEAD._replace(after="fit"),
}
