"""What all methods of calibration share: their registry, the text they read, and observations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from longrnn.diagnostics.observe import GLOBAL, observe
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.registry import Registry
from longrnn.text import Tokenizer
from longrnn.units import format_length

# Tokens between two observations.
EVERY = 16
Margin = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class Method(Protocol):
    """A dataclass whose fields are the settings of the method."""

    def run(self, job: Job) -> list[dict[str, Any]]:
        """Returns mappings with `kind` and options, of which `mitigation` makes one mitigation."""
        ...


METHODS: Registry[Method] = Registry("method of calibration")


class Inside(NamedTuple):
    """Observations inside the training length.

    Attributes:
        norms: `(layers, h)`, the largest norm of each head's state.
        retention: `(layers, h)`, geometric mean over the windows of the share of its state that
            each head retains over the training length; 1 in an Elman cell.
        dt: by layer, `(n, h)` float64, the steps of all tokens; empty for stepwise cells.
    """

    norms: Tensor
    retention: Tensor
    dt: list[Tensor]

    def thresholds(self, margin: float) -> list[list[float]]:
        """Returns the largest norms times a margin, to six digits."""
        return [[float(f"{margin * norm:.6g}") for norm in own] for own in self.norms.tolist()]

    def step_quantiles(self, share: float) -> list[list[float]]:
        """Returns the step of each head that at least this share of the steps do not exceed."""
        # Head by head: `quantile` accepts at most 16 million numbers. Rounded up, so that the step
        # that equals the quantile is not above it.
        return [[float(dt.quantile(share)) * (1 + 1e-6) for dt in own.unbind(1)] for own in self.dt]


class Job(NamedTuple):
    """What a calibration works on; `tokenizer` is that of the documents, lengths are in tokens."""

    model: LanguageModel
    documents: Sequence[Document]
    train_length: int
    target_length: int | None
    tokenizer: Tokenizer
    quiet: bool

    def target(self) -> int:
        """Returns the target length.

        Raises:
            UserError: there is none.
        """
        if self.target_length is None:
            raise UserError(
                "this method needs --target-length: give the length that the model should reach"
            )
        return self.target_length

    def share(self, quantile: float | None) -> float:
        """Returns the share of tokens to filter out: as many tokens are left as inside."""
        return 1 - self.train_length / self.target() if quantile is None else quantile

    def windows(self, length: int, most: int) -> Tensor:
        """Returns at most `most` disjoint windows, `(w, length)`, spread evenly over the texts."""
        starts = [
            (document, start)
            for document in self.documents
            for start in range(0, len(document.tokens) - length + 1, length)
        ]
        if not starts:
            longest = max((len(document.tokens) for document in self.documents), default=0)
            raise UserError(
                f"the longest text has {longest:,} tokens and a window needs {length:,}: give more "
                "text"
            )
        count = min(most, len(starts))
        chosen = [starts[i * len(starts) // count] for i in range(count)]
        return torch.stack([document.tokens[start : start + length] for document, start in chosen])

    def inside(self, most: int) -> Inside:
        """Observes at most `most` windows of the training length.

        Raises:
            UserError: the logits are not finite.
        """
        tokens = self.windows(self.train_length, most)
        stops = [*range(EVERY, self.train_length, EVERY), self.train_length]
        steps: list[list[Tensor]] = []
        with ExitStack() as exits:
            for cell in self.model.cells:
                if cell.scans:
                    steps.append([])
                    hook = cell.recurrence.register_forward_hook(partial(_keep_steps, steps[-1]))
                    exits.callback(hook.remove)
            progress = Progress("calibration", tokens.numel(), unit="tokens", quiet=self.quiet)
            seen = list(observe(self.model, tokens, stops, progress=exits.enter_context(progress)))
        if not all(bool(one.loss.isfinite().all()) for one in seen):
            explain_nonfinite(self.model, tokens)
        return Inside(
            torch.stack([one.norm for one in seen]).amax((0, 2)),
            seen[-1].retention.log().mean(1).exp().nan_to_num(1.0),
            [torch.cat(own, 1).flatten(0, 1) for own in steps],
        )

    def inside_global(self, most: int) -> Inside:
        """`inside`, if there is a global head.

        Raises:
            UserError: there is none.
        """
        found = self.inside(most)
        if not bool((found.retention > GLOBAL).any()):
            raise UserError(
                f"no head keeps more than {GLOBAL} of its state over "
                f"{format_length(self.train_length)} tokens, so no head can collapse and there is "
                "nothing to filter: use the model as it is"
            )
        return found


def _keep_steps(
    kept: list[Tensor], module: nn.Module, args: tuple[Any, ...], output: object
) -> None:
    """A forward hook of the recurrence of a scanning cell without mitigation, whose gain is dt."""
    kept.append(args[0].gain.double())
