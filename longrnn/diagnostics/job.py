"""What a calibration works on, and the registry of its methods."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from longrnn.cells.observe import watch
from longrnn.checkpoints.load import load_editable
from longrnn.checkpoints.names import training_length
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.diagnostics.states import GLOBAL, observe
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document, begun, read_documents
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.models import LanguageModel
from longrnn.registry import Registry
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.units import format_length

# Tokens between two observations.
CALIBRATED_EVERY = 16
# A strict filter leaves this share of the tokens that are left by default.
STRICT = 0.05
Members = list[dict[str, Any]]


class InsideObservations(NamedTuple):
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

    def step_quantiles(self, share: float) -> list[list[float]]:
        """Return the step of each head that at least this share of the steps do not exceed."""
        # By NumPy: torch accepts at most 16 million numbers. Rounded up, so that the step which is
        # the quantile is not above it.
        quantiles = [np.quantile(steps.cpu().numpy(), share, axis=0) for steps in self.dt]
        return [(steps * (1 + 1e-6)).tolist() for steps in quantiles]

    def global_heads(self) -> list[tuple[int, int]]:
        """Return (layer, head) of the global heads, the longest memory first.

        Raises:
            UserError: there is none.
        """
        heads = [(layer, head) for layer, head in (self.retention > GLOBAL).nonzero().tolist()]
        if not heads:
            raise UserError(
                f"no head keeps more than {GLOBAL} of its state over the training length, so no "
                "head can collapse and there is nothing to filter: use the model as it is"
            )
        return sorted(heads, key=lambda head: -float(self.retention[head]))


class Job(NamedTuple):
    """What a calibration works on.

    Attributes:
        model: with recurrent layers, usually without mitigation.
        documents: texts that are not used for evaluation.
        train_length: tokens that the model was trained on.
        target_length: tokens up to which it should work; 0 if no method needs it.
        tokenizer: that of the documents; bytes by default.
        quiet: show no progress.
        weights_file: where `fit(select=true)` writes additions to weights.
    """

    model: LanguageModel
    documents: Sequence[Document]
    train_length: int
    target_length: int = 0
    tokenizer: Tokenizer = ByteTokenizer()
    quiet: bool = False
    weights_file: Path | None = None

    @classmethod
    def open(
        cls,
        checkpoint: str,
        texts: Sequence[Path],
        train_length: int | None,
        target_length: int,
        *,
        device: str | None,
        quiet: bool = False,
        weights_file: Path | None = None,
    ) -> Self:
        """Load a checkpoint without mitigation, and read texts; None for the recorded length."""
        trained = train_length or training_length(checkpoint)
        model: Any = load_editable(checkpoint, device=device)
        tokenizer = load_tokenizer(checkpoint)
        documents = read_documents(texts, tokenizer, model)
        return cls(model, documents, trained, target_length, tokenizer, quiet, weights_file)

    @property
    def end(self) -> str:
        """In words, where the loss at the target length is measured."""
        length = format_length(self.target_length)
        if self.target_length >= 2 * self.train_length:
            return f"the last half of {length} tokens"
        return f"the tokens from {format_length(self.train_length)} to {length}"

    def under(self, members: Members) -> Self:
        """Return the same with the model under a mitigation."""
        return self._replace(model=self.model.under(members)) if members else self

    def write(self, path: Path, members: Members) -> None:
        """Write the file of a mitigation that was calibrated here."""
        write_calibration(path, members, self.known(path))

    def known(self, path: Path) -> Calibration:
        """Return what a file that is written here records."""
        hashes = tuple(document.sha256 for document in self.documents)
        return Calibration(str(path), self.model.fingerprint(), self.train_length, hashes)

    def share(self, quantile: float | None = None, left: float = 1.0) -> float:
        """Return the share of tokens to filter out: `left` times as many are left as inside."""
        return 1 - left * self.train_length / self.target_length if quantile is None else quantile

    def windows(self, length: int, most: int) -> Tensor:
        """Return at most `most` disjoint windows, `(w, length)`, spread evenly over the texts."""
        texts = [document.tokens for document in self.documents]
        if max(map(len, texts)) < length:
            raise UserError(
                f"the longest text has {max(map(len, texts)):,} tokens and a window needs "
                f"{length:,}: give more text"
            )
        long = [text for text in texts if len(text) >= length]
        windows = torch.cat([text.unfold(0, length, length) for text in long])
        count = min(most, len(windows))
        chosen = windows[torch.arange(count) * len(windows) // count]
        return begun(chosen, self.tokenizer.bos_id)

    def inside(self, most: int) -> InsideObservations:
        """Observe at most `most` windows of the training length.

        Raises:
            UserError: the logits are not finite.
        """
        tokens = self.windows(self.train_length, most)
        stops = [*range(CALIBRATED_EVERY, self.train_length, CALIBRATED_EVERY), self.train_length]
        recurrences = [cell.recurrence for cell in self.model.cells if cell.scans]
        steps: list[list[Tensor]] = [[] for _ in recurrences]

        def keep(index: int, seen: Any, *_: Any) -> None:
            steps[index].append(seen.gain.double())  # which is dt without a mitigation

        with watch(recurrences, keep):
            seen = observe(self.model, tokens, stops, trained=self.train_length, quiet=self.quiet)
        return InsideObservations(
            seen.norm.amax((0, 2)),
            seen.retention[-1].log().mean(1).exp().nan_to_num(1.0),
            [torch.cat(of_layer, 1).flatten(0, 1) for of_layer in steps],
        )


# Classes whose fields are their settings. `run(job, name)`, where `name` is that of the method,
# returns mappings with `kind` and options, of which `mitigation` makes one mitigation;
# `tokens(job)` estimates how many tokens it reads, counted without gradients.
METHODS: Registry[Any] = Registry("method of calibration")
