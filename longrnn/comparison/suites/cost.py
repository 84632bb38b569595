"""Speed, memory and state size in a suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from longrnn import processes
from longrnn.comparison import cost
from longrnn.comparison.suites.base import (
    EVALUATIONS,
    Evaluation,
    Measurement,
    Metric,
    sorted_lengths,
)
from longrnn.errors import UserError
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import out_of_reach
from longrnn.intervals import figure
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.results import Results, Row
from longrnn.units import TokenCount

# Columns, by the keys of `cost.measure`.
METRICS = {
    "prefill_tokens_per_second": Metric("prefill, tokens/s", figure, form=",.0f"),
    "decode_tokens_per_second": Metric("decoding, tokens/s", figure, form=",.0f"),
    "peak_mib": Metric("peak memory, MiB", figure, form=",.0f"),
    "peak_over_model_mib": Metric("of it above the model, MiB", figure, form=",.0f"),
    "state_bytes": Metric("state or cache, bytes", figure, form=",.0f"),
}


@EVALUATIONS.register("cost")
class Cost(Evaluation):
    """Speed, memory and size of the state at each length, one sequence at a time.

    Each measurement runs in a separate process that loads the model again, so that memory of other
    models and lengths is not included.

    Args:
        title: see `Evaluation`.
        seed: seed of the tokens to read.
        lengths: numbers of tokens to read, such as `[256, 4k]`.
        decode: number of tokens to generate after that.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("lengths",)

    def __init__(
        self, title: str, seed: int, *, lengths: list[str], decode: TokenCount = 32
    ) -> None:
        super().__init__(title, seed)
        self.lengths, self.decode = sorted_lengths(lengths), decode
        if decode < 1:
            raise UserError(
                f"decode must be at least 1, not {self.decode}: set it to the tokens to generate"
            )

    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        header = {
            "evaluation": "cost",
            "model": model.model.fingerprint(),
            "device": model.device,
            "threads": torch.get_num_threads(),
            "decode": self.decode,
            "seed": self.seed,
        }
        results = Results(output, header)
        found = {row["length"]: row for row in results.rows}
        reasons = {n: out_of_reach(model.model, n + self.decode) for n in self.lengths}
        todo = [n for n, reason in reasons.items() if reason is None and n not in found]
        # One process measures, while the others wait: they would slow it down.
        found, reasons = processes.on_main(
            lambda: self._missing(model, results, todo, found, reasons, quiet)
        )
        return [
            Measurement(metric, n, {"": found[n][name]} if reasons[n] is None else {}, reasons[n])
            for n in self.lengths
            for name, metric in METRICS.items()
        ]

    def _missing(
        self,
        model: OpenCheckpoint,
        results: Results,
        todo: Sequence[int],
        found: dict[int, Row],
        reasons: dict[int, str | None],
        quiet: bool,
    ) -> tuple[dict[int, Row], dict[int, str | None]]:
        """Measure `todo`; return all rows by length, and the reasons for missing ones."""
        if todo:
            # Otherwise the process would report it as the reason of one length only.
            tokens = torch.arange(8)[None] % model.model.vocab_size
            refuse_nonfinite(model.model(tokens.to(model.device)).logits, model.model, tokens)
        title = f"{self.title} {model.name}"
        with Progress(title, len(todo), unit="tokens", quiet=quiet) as progress:
            for length in todo:
                measured = cost.in_a_process(
                    cost.Job(
                        model.source,
                        model.device,
                        torch.get_num_threads(),
                        length,
                        self.decode,
                        self.seed,
                    )
                )
                # A failed measurement has no row, so that it is repeated the next time.
                if isinstance(measured, str):
                    reasons[length] = measured
                else:
                    found[length] = {"length": length, **measured}
                    results.append([found[length]])
                progress.advance(1, length)
        return found, reasons
