"""Small models and one with known answers, and what an evaluation finds of them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.checkpoints.layouts import save_model
from longrnn.checkpoints.names import CheckpointName
from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.data.prompts import QUESTION
from longrnn.evaluation.base import Evaluation
from longrnn.evaluation.options import EvaluationOptions
from longrnn.evaluation.run import run
from longrnn.models import LMOutput, RecurrentConfig, RecurrentLM
from longrnn.reporting.tables import ResultTable
from longrnn.results import StoredRow, read_rows
from longrnn.state import History, LMState
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


def measure(
    options: EvaluationOptions | Evaluation[Any], folder: Path, *models: Any
) -> ResultTable:
    """Run one evaluation of models that are open or read bytes, with its store in a folder."""
    evaluation = options if isinstance(options, Evaluation) else options.evaluation()
    opened = [
        model
        if isinstance(model, OpenCheckpoint)
        else OpenCheckpoint(f"model{number}", model, ByteTokenizer())
        for number, model in enumerate(models)
    ]
    return run(opened, [evaluation], folder, quiet=True)[0]


def cells(outcome: ResultTable) -> dict[tuple[str, int | None, str], Any]:
    """Return cells by column, length and model."""
    return {(cell.metric, cell.at, cell.model): cell for cell in outcome.cells}


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


class Answering:
    """Says a function of the ids that it has read, which are its state."""

    vocab_size = 256
    max_length = mitigation = None

    def __init__(self, name: str, answer: Callable[[list[int]], int]) -> None:
        self.name, self.answer = name, answer

    def fingerprint(self) -> str:
        return self.name

    def init_state(self, batch_size: int) -> LMState:
        position = torch.zeros(batch_size, dtype=torch.long)
        return LMState(position, (History(position.new_zeros(batch_size, 0, 1)),))

    def __call__(
        self, tokens: Tensor, state: LMState, *, keep: int | None = None, **_: Any
    ) -> LMOutput:
        entries = torch.cat([state.layers[0].entries, tokens.long()[..., None]], 1)
        after, last = state.position + tokens.shape[1], tokens.shape[1] if keep is None else keep
        texts = [row[-n:, 0].tolist() for row, n in zip(entries, after.tolist(), strict=True)]
        said = [[self.answer(ids[: len(ids) - k]) for k in reversed(range(last))] for ids in texts]
        logits = F.one_hot(torch.tensor(said, dtype=torch.long), self.vocab_size).float()
        return LMOutput(logits, LMState(after, (History(entries),)))


class Oracle(Answering):
    """Reads a passkey prompt of bytes and generates its key; from `forgets` tokens on, 00000."""

    def __init__(self, *, forgets: float = math.inf, name: str = "oracle") -> None:
        super().__init__(name, self._answer)
        self.forgets = forgets
        self.prompts = 0  # rows that were asked the question
        self.longest = 0  # tokens of the longest single call

    def __call__(self, tokens: Tensor, state: LMState, **options: Any) -> LMOutput:
        output = super().__call__(tokens, state, **options)
        self.longest = max(self.longest, tokens.shape[1])
        self.prompts += _asked(output.state) - _asked(state)
        return output

    def _answer(self, ids: list[int]) -> int:
        prompt, _, said = "".join(map(chr, ids)).partition(QUESTION)
        key = "".join(filter(str.isdigit, prompt))[:5] if len(ids) < self.forgets else "0" * 5
        return ord(f" {key:5}."[min(len(said), 6)])


def _asked(state: LMState) -> int:
    """How many rows of a state have read the question."""
    texts = ("".join(map(chr, row.flatten().tolist())) for row in state.layers[0].entries)
    return sum(QUESTION in text for text in texts)
