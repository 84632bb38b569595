"""Small models for comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from longrnn.hf.training import build_transformer, save_transformer

from longrnn.comparison.suites import Evaluation, Measurement
from longrnn.config import build_config
from longrnn.hf.opened import OpenCheckpoint
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from longrnn.text import ByteTokenizer, Tokenizer

SHORT: dict[str, Any] = {"kind": "learned", "max_length": 300, "combine": "add"}


class PairTokenizer:
    """One id for two bytes, so that a text has half as many tokens; many pairs share an id."""

    vocab_size = 997
    eos_id: int | None = None

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


def points(
    evaluation: Evaluation, model: OpenCheckpoint, output: Path, *others: OpenCheckpoint
) -> list[Measurement]:
    """Prepare and measure one model, with others in the comparison."""
    evaluation.prepare([model, *others])
    return evaluation.measure(model, output, quiet=True)


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
    return OpenCheckpoint(name, model, tokenizer, str(folder))


def llama(folder: Path, *, positions: int) -> None:
    """Write a random transformer over bytes with this maximum length."""
    torch.manual_seed(0)
    options = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": positions,
    }  # fmt: skip
    model = build_transformer(options)
    save_transformer(model, folder, ByteTokenizer(), model.state_dict())
