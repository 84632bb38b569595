"""Small models, and what an evaluation finds of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longrnn.config import build_config
from longrnn.evaluation.base import Evaluation
from longrnn.evaluation.options import EvaluationOptions
from longrnn.evaluation.run import Outcome, run
from longrnn.hf.names import CheckpointName
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from longrnn.results import StoredRow, read_rows
from longrnn.text import ByteTokenizer, Tokenizer

SHORT: dict[str, Any] = {"kind": "learned", "max_length": 300, "combine": "add"}


class PairTokenizer(ByteTokenizer):
    """One id for two bytes, so that a text has half as many tokens; many pairs share an id."""

    vocab_size = 997

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        data += b" " * (len(data) % 2)
        return [(256 * a + b) % self.vocab_size for a, b in zip(data[::2], data[1::2], strict=True)]

    def byte_ends(self, text: str) -> list[int]:
        n = len(text.encode())
        return [min(end, n) for end in range(2, n + 2, 2)]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def fingerprint(self) -> str:
        return "pairs"


def measure(
    options: EvaluationOptions | Evaluation[Any], folder: Path, *models: OpenCheckpoint
) -> Outcome:
    """Run one evaluation, with its store in a folder."""
    evaluation = options if isinstance(options, Evaluation) else options.evaluation()
    return run(models, [evaluation], folder, quiet=True)[0]


def cells(outcome: Outcome) -> dict[tuple[str, int | None, str], Any]:
    """Return cells by column, length and model."""
    return {(cell.metric, cell.at, cell.model): cell for cell in outcome.table.cells}


def rows(folder: Path) -> list[StoredRow]:
    """Return the rows of a store, all of which must be whole."""
    found, damaged = read_rows(folder / "rows.jsonl")
    assert damaged == []
    return found


def small_model(
    name: str,
    seed: int = 0,
    *,
    folder: Path | None = None,
    tokenizer: Tokenizer | None = None,
    **changes: Any,
) -> OpenCheckpoint:
    """Return a random model; with a folder, it is saved there for another process."""
    tokenizer = tokenizer or ByteTokenizer()
    config = {"vocab_size": tokenizer.vocab_size, "d_model": 8, "n_layers": 1} | changes
    config.setdefault("mixer", {"kind": "lstm"})
    torch.manual_seed(seed)
    model = RecurrentLM(build_config(RecurrentConfig, config)).eval()
    if folder is not None:
        save_model(model, folder)
    source = None if folder is None else CheckpointName(str(folder))
    return OpenCheckpoint(name, model, tokenizer, source)
