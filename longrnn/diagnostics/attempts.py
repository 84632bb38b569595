"""What a repair tries, from cheap to dear, and what each costs.

An attempt is a way to make the mappings of a mitigation: a fixed one, or a method of `calibrate`,
on the plain model or on top of another attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from longrnn.diagnostics.calibrate import calibrate
from longrnn.diagnostics.job import Members
from longrnn.evaluation.texts import Document
from longrnn.mitigations import mitigation
from longrnn.models import LanguageModel
from longrnn.text import Tokenizer

FIT_STEPS, FIT_ROWS = 300, 8
# A token of a step with gradients takes as long as so many tokens without.
GRADIENT = 4
# Passes over its windows and prompts in which a choice per head finds something, and at most.
LEAST_PASSES, MOST_PASSES = 5, 60
SEARCH_STEPS = 10


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

    def calibrated(self, method: str, before: Members) -> Members:
        """Return the mappings of another mitigation and of what `calibrate` finds under it."""
        model = self.model.under([mitigation(member) for member in before])
        found = calibrate(
            model,
            self.documents,
            method,
            train_length=self.trained,
            target_length=self.length,
            tokenizer=self.tokenizer,
            quiet=self.quiet,
        )
        return [*before, *found]

    def passes(self, tokens: float) -> int:
        """Return how many passes of a choice per head read at most so many tokens."""
        return min(MOST_PASSES, int(tokens / self.length / (1 + self.keys)))


class Attempt(NamedTuple):
    """One thing to try.

    Attributes:
        make: returns the mappings, from those of `after`, and the tokens that may be read.
        folds: whether weights can express the result.
        after: the name of the attempt that it builds on; empty for the plain model.
        tokens: about how many tokens it reads, counted without gradients.
    """

    make: Callable[[Setting, Members, float], Members]
    folds: bool = False
    after: str = ""
    tokens: Callable[[Setting], float] = lambda setting: 0.0


def _forget_more(setting: Setting, before: Members, tokens: float) -> Members:
    scale = 1 - 1 / setting.trained
    return [*before, {"kind": "forget_more", "decay_scale": scale, "input_scale": 1.0}]


def _sliding_window(setting: Setting, before: Members, tokens: float) -> Members:
    return [*before, {"kind": "sliding_window", "window": setting.trained}]


def _calibrated(method: str) -> Callable[[Setting, Members, float], Members]:
    return lambda setting, before, tokens: setting.calibrated(method, before)


def _fit(setting: Setting, before: Members, tokens: float) -> Members:
    method = f"fit(steps={FIT_STEPS}, rows={FIT_ROWS}, keys={setting.keys})"
    return setting.calibrated(method, before)


def _fit_tokens(setting: Setting) -> float:
    segment = max(setting.trained, setting.length / FIT_STEPS)
    return GRADIENT * FIT_STEPS * (FIT_ROWS + setting.keys) * segment


def _per_head(setting: Setting, before: Members, tokens: float) -> Members:
    passes = setting.passes(tokens)
    method = f"per_head(windows=1, keys={setting.keys}, passes={passes})"
    return setting.calibrated(method, before)


def _least_per_head(setting: Setting) -> float:
    return LEAST_PASSES * (1 + setting.keys) * setting.length


def _search_tokens(setting: Setting) -> float:
    return (len(setting.model.cells) + 1 + SEARCH_STEPS) * setting.length


def _inside(setting: Setting) -> float:
    return 32 * setting.trained


SEARCH = f"scale_decay(windows=1, steps={SEARCH_STEPS})"
FILTER, PER_HEAD = _calibrated("token_filter"), Attempt(_per_head, tokens=_least_per_head)
ATTEMPTS = {
    "forget_more": Attempt(_forget_more),
    "sliding_window": Attempt(_sliding_window),
    "state_norm": Attempt(_calibrated("state_norm"), tokens=_inside),
    "token_filter": Attempt(FILTER, tokens=_inside),
    "scale_decay": Attempt(_calibrated(SEARCH), folds=True, tokens=_search_tokens),
    "fit": Attempt(_fit, folds=True, tokens=_fit_tokens),
    "fit + token_filter": Attempt(FILTER, after="fit", tokens=_inside),
    "per_head": PER_HEAD,
    "fit + per_head": PER_HEAD._replace(after="fit"),
}
