"""Small models and one with known answers, and what an evaluation finds of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrnn.checkpoints.folder import save_model
from longrnn.checkpoints.names import CheckpointName
from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.data.prompts import QUESTION
from longrnn.evaluation.base import Evaluation
from longrnn.evaluation.options import EvaluationOptions
from longrnn.evaluation.run import Outcome, run
from longrnn.models import LMOutput, RecurrentConfig, RecurrentLM, Rows
from longrnn.results import StoredRow, read_rows
from longrnn.state import LMState
from longrnn.text import ByteTokenizer, Tokenizer

SHORT: dict[str, Any] = {"kind": "learned", "max_length": 300, "combine": "add"}


class PairTokenizer(ByteTokenizer):
    """One id for two bytes, so that a text has half as many tokens; many pairs share an id."""

    vocab_size = 997

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        data += b" " * (len(data) % 2)
        return [(256 * a + b) % self.vocab_size for a, b in zip(data[::2], data[1::2], strict=True)]

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        n = len(text.encode())
        return self.encode(text), [min(end, n) for end in range(2, n + 2, 2)]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def fingerprint(self) -> str:
        return "pairs"


def measure(options: EvaluationOptions | Evaluation[Any], folder: Path, *models: Any) -> Outcome:
    """Run one evaluation of models that are open or read bytes, with its store in a folder."""
    evaluation = options if isinstance(options, Evaluation) else options.evaluation()
    opened = [
        model
        if isinstance(model, OpenCheckpoint)
        else OpenCheckpoint(f"model{number}", model, ByteTokenizer())
        for number, model in enumerate(models)
    ]
    return run(opened, [evaluation], folder, quiet=True)[0]


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
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 8, "n_layers": 1}
    config: dict[str, Any] = sizes | changes
    config.setdefault("mixer", {"kind": "lstm"})
    torch.manual_seed(seed)
    model = RecurrentLM(RecurrentConfig(**config)).eval()
    if folder is not None:
        save_model(model, folder)
    source = None if folder is None else CheckpointName(str(folder))
    return OpenCheckpoint(name, model, tokenizer, source)


class Oracle:
    """Reads a passkey prompt of bytes and generates its key.

    Its state holds the last six bytes, the first five digits in a row, how many digits it has
    said, and how much of the question it has just read: no more than a true recurrent state could.

    Args:
        forgets: from this many tokens on it says 00000; None for never.
        name: of its fingerprint.
    """

    vocab_size = 256
    max_length = None
    mitigation = None

    def __init__(self, *, forgets: int | None = None, name: str = "oracle") -> None:
        self.forgets, self.name = forgets, name
        self.prompts = 0  # rows that were asked the question
        self.longest = 0  # tokens of the longest single call

    def fingerprint(self) -> str:
        return self.name

    def init_state(self, batch_size: int) -> LMState:
        key = torch.zeros(batch_size, 5, dtype=torch.long)
        counters = torch.zeros(batch_size, 3, dtype=torch.long)  # digits, of the question, said
        return LMState(torch.zeros(batch_size, dtype=torch.long), (key, counters))

    def __call__(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        rows: Rows | None = None,
    ) -> LMOutput:
        assert state is not None
        self.longest = max(self.longest, tokens.shape[1])
        keys, counts = (leaf.tolist() for leaf in state.layers)
        said: list[int] = []
        for row, ids in enumerate(tokens.tolist()):
            said.append(self._read(ids, keys[row], counts[row], int(state.position[row])))
        logits = torch.nn.functional.one_hot(torch.tensor(said), 256).float()[:, None]
        layers = (torch.tensor(keys), torch.tensor(counts))
        after = LMState(state.position + tokens.shape[1], layers)
        return LMOutput(logits[:, : 1 if keep is None else keep], after)

    def _read(self, ids: list[int], key: list[int], counts: list[int], position: int) -> int:
        """Process one row, change `key` and `counts`, and return the next byte."""
        question = QUESTION.encode()
        for byte in ids:
            if chr(byte).isdigit() and counts[0] < 5:
                key[counts[0]] = byte
                counts[0] += 1
            if counts[1] == len(question):
                counts[2] += 1
            elif byte == question[counts[1]]:
                counts[1] += 1
                self.prompts += counts[1] == len(question)
            else:
                counts[1] = int(byte == question[0])
        lost = self.forgets is not None and position + len(ids) >= self.forgets
        digits = [ord("0")] * 5 if lost else key
        return [ord(" "), *digits, ord(".")][min(counts[2], 6)]
