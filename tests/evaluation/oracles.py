"""Language models that give known answers, because their state holds what they have read."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.data.prompts import QUESTION
from longrnn.models import LMOutput
from longrnn.ops.rows import Rows
from longrnn.state import LMState


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
