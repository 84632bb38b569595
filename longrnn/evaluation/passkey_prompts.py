"""The prompts of the passkey evaluation: where the keys are, and which one is queried.

Notable choices:
- A relative depth puts the key at a share of the filler, so that its position grows with the
  prompt. An absolute insertion point puts the key after a fixed number of filler tokens at every
  length, which separates the position of the key from its distance to the question.
- If header, key and question are a small part of a prompt, a depth is a share of the whole length,
  so that half of 4k and a quarter of 8k are the same position.
- A key depends on its position and index only: a longer prompt with a key at the same position
  begins with a shorter one, and the common beginning is read once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from longrnn.data import Passkey
from longrnn.data.prompts import Needle, draw_needles, keys
from longrnn.inference.engine import Prompt

# A prompt is short if everything but its filler is more than 1 / SHORT of it.
SHORT = 8


class Question(NamedTuple):
    """One prompt.

    Attributes:
        length: exact length of the prompt in tokens.
        place: a depth from 0 to 1 (float), or the tokens of filler before the key (int).
        number: which of the prompts of this length and place.
        needles: the keys.
        asked: index of the key that is queried.
        start: where in the filler the prompt begins, as a share of it.
        covers: length of the prompt, as a share of the filler.
    """

    length: int
    place: Any
    number: int
    needles: list[Needle]
    asked: int
    start: float
    covers: float

    @property
    def needle(self) -> Needle:
        """The key that is queried."""
        return self.needles[self.asked]


def draw(task: Passkey, length: int, place: Any, number: int, seed: int, n_keys: int) -> Question:
    """Return a prompt's keys, all held out from training; the queried one is at `place`."""
    start, covers = random.Random(f"{seed}/{number}").random(), length / task.n_filler
    if n_keys > 1:
        rng = random.Random(f"{seed}/{place}/{number}")
        needles = draw_needles(rng, n_keys, held_out=True)
        asked = rng.randrange(n_keys)
        needles[asked] = needles[asked]._replace(depth=place)
        return Question(length, place, number, needles, asked, start, covers)
    is_depth = isinstance(place, float)
    token = round(place * length) if is_depth else place
    key = random.Random(f"{seed}/{token}/{number}").choice(keys(True))
    free = task.free(key, length)
    is_share = is_depth and (length - free) * SHORT > length
    # The prompt multiplies by `free` and rounds: a quotient of integers comes back exactly.
    depth = place if is_share else min(token, free) / max(free, 1)
    return Question(length, place, number, [Needle(key, depth)], 0, start, covers)


def build(task: Passkey, questions: Sequence[Question], *, naive: bool) -> list[Prompt]:
    """Return prompts for the engine.

    Args:
        task: makes the ids.
        questions: the keys.
        naive: read every prompt separately instead of sharing prefixes.
    """
    prompts = []
    for index, asked in enumerate(questions):
        start = int(asked.start * task.n_filler) if task.own_filler else 0
        context = task.context(asked.needles, asked.asked, length=asked.length, start=start)
        # The fork is after header and filler, at the first key line. Prompts with the same single
        # key share a branch; with several keys, the text after the first depends on the length.
        fork = context[0].size + context[1].size
        branch = asked.needles[0].key if len(asked.needles) == 1 else asked[:3]
        shared = (None, 0, index) if naive else (start, fork, branch)
        prompts.append(Prompt(context, task.question(asked.needle), *shared))
    return prompts
