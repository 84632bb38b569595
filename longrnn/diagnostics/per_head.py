"""One mitigation per head: the mildest that the measured loss beyond the training length permits.

Notable choices:
- The options of the choices come from the training length L: thresholds from observations of text
  inside it, a window of L tokens, and decays that forget within L tokens.
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
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from longrnn.data.batch import UNSCORED
from longrnn.data.prompts import PasskeyPrompts, draw_needles
from longrnn.diagnostics.calibration import METHODS, Job, Margin, Share
from longrnn.diagnostics.observe import GLOBAL
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.options import Count, Seed
from longrnn.progress import Progress

# A milder choice is taken unless its objective is above the least one by more than this, in nats.
TOLERANCE = 0.002

Head = tuple[int, int]
Chosen = dict[Head, str]


@METHODS.register("per_head")
@dataclass(kw_only=True)
class PerHead:
    """One member per choice that any head has, with these heads.

    Attributes:
        windows: the maximum number of windows of text of the target length.
        margin: ratio of the threshold of `state_norm` to the largest norm seen.
        quantile: share of tokens that `token_filter` leaves out.
        keys: passkey prompts of the target length whose answers count beside the loss of the text.
        passes: the maximum number of passes over all windows and prompts.
        seed: of the keys.
    """

    windows: Count = 32
    margin: Margin = 1.0
    quantile: Share | None = None
    keys: Annotated[int, Field(ge=0)] = 0
    passes: Annotated[int, Field(ge=5)] = 300
    seed: Seed = 0

    def run(self, job: Job) -> list[dict[str, Any]]:
        trained = job.train_length
        # As many tokens as the search reads.
        found = job.inside_global(self.windows * job.target() // trained)
        candidates = (found.retention > GLOBAL) & (found.norms > 0)
        kept = {
            (layer, head): float(found.retention[layer, head])
            for layer, head in candidates.nonzero().tolist()
        }
        # The mildest first.
        options: dict[str, dict[str, Any]] = {
            "none": {},
            "token_filter": {"threshold": found.step_quantiles(job.share(self.quantile))},
            "state_norm": {"threshold": found.thresholds(self.margin)},
            "forget_more": {"decay_scale": 1 - 1 / trained, "input_scale": 1.0},
            "sliding_window": {"window": trained},
        }
        cell = type(job.model.cells[0])
        options = {k: v for k, v in options.items() if MITIGATIONS[k].undefined(cell) is None}
        device = job.model.init_state(1).position.device
        rows, targets = (one.to(device) for one in self.rows(job))
        with Progress("per head", self.passes, unit="tokens", quiet=job.quiet) as progress:
            search = Search(job.model, rows, targets, options, self.passes, progress)
            return search.members(search.run(kept))

    def rows(self, job: Job) -> tuple[Tensor, Tensor]:
        """Return windows of text, then prompts with keys, and the targets, both `(b, target)`.

        A prompt is the header, text, one key line, text, the question and the answer. The keys are
        those of training, which no evaluation uses, and are spread evenly over the text.
        """
        length, rng = job.target() + 1, random.Random(self.seed)
        rows = [*job.windows(length, self.windows)]
        targets = [row[1:] for row in rows]
        for number, page in enumerate(job.windows(length, self.keys) if self.keys else []):
            prompts = PasskeyPrompts(job.tokenizer, job.tokenizer.decode(page.tolist()), 1)
            needle = draw_needles(rng, 1)[0]._replace(depth=number / self.keys)
            answer = prompts.answer(needle)
            prompt = prompts.prompt_of([needle], 0, length=length - len(answer))
            rows.append(torch.cat([prompt, answer]))
            unscored = torch.full((len(prompt) - 1,), UNSCORED)
            targets.append(torch.cat([unscored, answer]))
        return torch.stack(rows)[:, :-1], torch.stack(targets)


@dataclass
class Search:
    """A search for one choice per head.

    Attributes:
        model: without mitigation.
        rows: `(b, t)` tokens.
        targets: `(b, t)`, the tokens after them, UNSCORED where they do not count.
        options: of the choices that are defined for the cells of the model.
        passes: the maximum number of passes over `rows`.
        progress: counts the passes.
        known: objectives by the choices of all heads.
    """

    model: LanguageModel
    rows: Tensor
    targets: Tensor
    options: Mapping[str, dict[str, Any]]
    passes: int
    progress: Progress
    known: dict[tuple[str, ...], float] = field(default_factory=dict)

    def run(self, kept: Mapping[Head, float]) -> Chosen:
        """Return the choice for each head, given with its retention."""
        heads = sorted(kept, key=lambda head: (-kept[head], head))
        choices = list(self.options)
        chosen = self.choose(dict.fromkeys(heads, "none"), heads, choices)
        if not math.isfinite(self.objective(chosen)):
            explain_nonfinite(self.model, self.rows)
        for layer in sorted({layer for layer, _ in heads}):
            chosen = self.choose(chosen, [one for one in heads if one[0] == layer], choices)
        offered = [one for one in choices if one in {"none", *chosen.values()}]
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

    def objective(self, chosen: Chosen) -> float:
        """Return the loss in nats, per token of text and per token of the answers, added up."""
        key = tuple(chosen.values())
        if key not in self.known:
            model = self.model.under(mitigation(self.members(chosen)))
            nats, _ = model.token_losses(self.rows, self.targets)
            scored = self.targets != UNSCORED
            is_text = scored.all(1)
            total = sum(
                float(nats[which].double().sum() / scored[which].sum())
                for which in (is_text, ~is_text)
                if which.any()
            )
            self.known[key] = total if math.isfinite(total) else math.inf
            plain, least = next(iter(self.known.values())), min(self.known.values())
            self.progress.advance(1, self.rows.numel(), f"loss {plain:.3f}, now {least:.3f}")
        return self.known[key]

    def members(self, chosen: Chosen) -> list[dict[str, Any]]:
        """Return the mappings of which `mitigation` makes one mitigation."""
        found = []
        for choice in [*self.options][1:]:
            own = sorted(head for head, taken in chosen.items() if taken == choice)
            if not own:
                continue
            options = dict(self.options[choice])
            if "threshold" in options:
                options["threshold"] = [
                    [value if (layer, head) in own else None for head, value in enumerate(values)]
                    for layer, values in enumerate(options["threshold"])
                ]
            else:
                options["heads"] = [list(head) for head in own]
            found.append({"kind": choice, **options})
        return found or [{"kind": "none"}]
