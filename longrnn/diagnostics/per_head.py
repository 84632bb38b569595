"""One mitigation per head: the mildest that the measured loss beyond the training length permits.

Notable choices:
- The options of CHOICES come from the training length L: thresholds from statistics of text inside
  it, a window of L tokens, and decays that forget within L tokens.
- Candidates are the global heads (see `GLOBAL`). The others hold nothing that is older than L.
- The objective is measured: nats per token of texts of the target length, plus, with `keys`, nats
  per token of the answers to passkey prompts of that length in the same texts.
- Heads act together: to limit one repairs nothing while others collapse. The search therefore
  starts from the best choice for all candidates alike, then visits whole layers, and then single
  heads, the longest memory first, until no head changes or `passes` are spent. A single head is
  offered `none` and what other heads have by then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longrnn.data.batch import UNSCORED
from longrnn.data.prompts import FILLER, HEADER, PasskeyPrompts, draw_needles
from longrnn.diagnostics.layer_statistics import GLOBAL, Job, statistics, windows
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.units import format_length

# The mildest first.
CHOICES = ("none", "token_filter", "state_norm", "forget_more", "sliding_window")
# A milder choice is taken unless its objective is above the least one by more than this, in nats.
TOLERANCE = 0.002
# Tokens of all rows in one call of the model.
CALL = 2**15

Head = tuple[int, int]
Chosen = dict[Head, str]


def per_head(job: Job) -> list[dict[str, Any]]:
    """Return one member per choice that any head has, with these heads.

    Raises:
        UserError: no head is global, a text is too short, or no choice has finite logits.
    """
    settings, trained = job.settings, job.settings.trained()
    # As many tokens as the search reads.
    most = settings.windows * settings.target() // trained
    found = statistics(job.model, windows(job.documents, trained, most), job.quiet)
    norms = [one.largest_norms(settings.margin) for one in found]
    kept = {
        (layer, head): value
        for layer, one in enumerate(found)
        for head, value in enumerate(one.retention().tolist())
        if value > GLOBAL and norms[layer][head] > 0
    }
    if not kept:
        raise UserError(
            f"no head keeps more than {GLOBAL} of its first token over {format_length(trained)} "
            "tokens, so no head can collapse: the model needs no mitigation"
        )
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "state_norm": {"threshold": norms},
        "forget_more": {"decay_scale": 1 - 1 / trained, "input_scale": 1.0},
        "sliding_window": {"window": trained},
    }
    if job.model.cells[0].scans:
        share = settings.filtered()
        options["token_filter"] = {"threshold": [one.step_quantiles(share) for one in found]}
    rows, targets = rows_to_score(job)
    with Progress("per head", settings.passes, unit="tokens", quiet=job.quiet) as progress:
        search = Search(job.model, rows, targets, options, settings.passes, progress)
        return search.members(search.run(kept))


class Search:
    """A search for one choice per head.

    Args:
        model: without mitigation.
        rows: `(b, t)` tokens.
        targets: `(b, t)`, the tokens after them, UNSCORED where they do not count.
        options: of the choices.
        passes: the maximum number of passes over `rows`.
        progress: counts the passes.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: Tensor,
        targets: Tensor,
        options: Mapping[str, dict[str, Any]],
        passes: int,
        progress: Progress,
    ) -> None:
        device = model.init_state(1).position.device
        self.rows, self.targets = rows.to(device), targets.to(device)
        self.model, self.options = model, options
        self.passes, self.progress = passes, progress
        cell = type(model.cells[0])
        self.choices = [one for one in CHOICES if MITIGATIONS[one].undefined(cell) is None]
        self.known: dict[tuple[str, ...], float] = {}

    def run(self, kept: Mapping[Head, float]) -> Chosen:
        """Return the choice for each head, given with its retention."""
        heads = sorted(kept, key=lambda head: (-kept[head], head))
        chosen = self.choose(dict.fromkeys(heads, "none"), heads, self.choices)
        if not math.isfinite(self.objective(chosen)):
            explain_nonfinite(self.model, self.rows)
        for layer in sorted({layer for layer, _ in heads}):
            chosen = self.choose(chosen, [one for one in heads if one[0] == layer], self.choices)
        offered = [one for one in self.choices if one in {"none", *chosen.values()}]
        before: Chosen = {}
        while chosen != before:
            before = chosen
            for head in heads:
                chosen = self.choose(chosen, [head], offered)
        return chosen

    def choose(self, chosen: Chosen, group: Sequence[Head], offered: Sequence[str]) -> Chosen:
        """Return `chosen` with the mildest choice for a group of heads that is nearly the best."""
        tried = [chosen | dict.fromkeys(group, choice) for choice in offered]
        new = [one for one in tried if tuple(one.values()) not in self.known]
        if len(self.known) + len(new) > self.passes:
            return chosen
        values = [self.objective(one) for one in tried]
        allowed = min(values) + TOLERANCE
        return next(one for one, value in zip(tried, values, strict=True) if value <= allowed)

    @torch.no_grad()
    def objective(self, chosen: Chosen) -> float:
        """Return the loss in nats, per token of text and per token of the answers, added up."""
        key = tuple(chosen.values())
        if key not in self.known:
            model = self.model.under(mitigation(self.members(chosen)))
            sums, state = torch.zeros(len(self.rows), dtype=torch.float64), None
            width = max(1, CALL // len(self.rows))
            for part, target in zip(
                self.rows.split(width, 1), self.targets.split(width, 1), strict=True
            ):
                nats, state = model.token_losses(part, target, state)
                sums += nats.double().sum(1).cpu()
            counts = (self.targets != UNSCORED).sum(1).cpu()
            is_text = counts == self.rows.shape[1]
            total = sum(
                float(sums[k].sum() / counts[k].sum()) for k in (is_text, ~is_text) if k.any()
            )
            self.known[key] = total if math.isfinite(total) else math.inf
            plain, least = next(iter(self.known.values())), min(self.known.values())
            self.progress.advance(1, self.rows.numel(), f"loss {plain:.3f}, now {least:.3f}")
        return self.known[key]

    def members(self, chosen: Chosen) -> list[dict[str, Any]]:
        """Return the mappings of which `mitigation` makes one mitigation."""
        found = []
        for choice in self.choices[1:]:
            own = sorted(head for head, taken in chosen.items() if taken == choice)
            options = dict(self.options[choice])
            if "threshold" in options:
                options["threshold"] = [
                    [value if (layer, head) in own else None for head, value in enumerate(values)]
                    for layer, values in enumerate(options["threshold"])
                ]
            else:
                options["heads"] = [list(head) for head in own]
            if own:
                found.append({"kind": choice, **options})
        return found or [{"kind": "none"}]


def rows_to_score(job: Job) -> tuple[Tensor, Tensor]:
    """Return rows of the target length and their targets: windows of text, then prompts with keys.

    A prompt is the header, text, one key line, text, the question and the answer. The keys are
    those of training, which no evaluation uses, and are spread evenly over the text.
    """
    settings, length = job.settings, job.settings.target() + 1
    text = job.windows(length)
    if settings.keys == 0:
        return text[:, :-1], text[:, 1:]
    prompts, rng = PasskeyPrompts(job.tokenizer, FILLER, 1), random.Random(settings.seed)
    if length <= prompts.least_length():
        raise UserError(
            f"prompts with keys need a target length above {prompts.least_length()} tokens: give a "
            "greater one, or leave out keys"
        )
    header, rows, answers = prompts.ids(HEADER), [], []
    for number, page in enumerate(windows(job.documents, length, settings.keys)):
        (needle,) = draw_needles(rng, 1)
        line, question = prompts.line(needle), prompts.question(needle)
        answer = prompts.answer(needle)
        free = length - sum(map(len, (header, line, question, answer)))
        place = free * number // settings.keys
        parts = [header, page[:place], line, page[place:free], question, answer]
        rows.append(torch.cat(parts))
        answers.append(rows[-1][1:].clone())
        answers[-1][: -len(answer)] = UNSCORED
    every = torch.stack(rows)
    return torch.cat([text[:, :-1], every[:, :-1]]), torch.cat([text[:, 1:], torch.stack(answers)])
