"""`OpenCheckpoint`: a loaded model with its tokenizer and the name used in results."""

from __future__ import annotations

from typing import NamedTuple

import torch

from longrnn.errors import UserError
from longrnn.hf.load import load
from longrnn.hf.names import split_dtype, split_spec
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.models.base import LanguageModel
from longrnn.text import Tokenizer


class OpenCheckpoint(NamedTuple):
    """A model that is ready for evaluation.

    Attributes:
        name: its name in results, rows and columns.
        model: any language model, with its mitigation applied.
        tokenizer: the tokenizer of the model.
        source: what another process passes to `load` and `load_tokenizer` to open the same model;
            empty for a model that was built in this process.
        device: the device of the model.
    """

    name: str
    model: LanguageModel
    tokenizer: Tokenizer
    source: str = ""
    device: str = "cpu"

    @property
    def checkpoint(self) -> str:
        """`source` without its dtype and mitigation."""
        return split_spec(self.source)[0]

    @property
    def mitigation(self) -> str | None:
        """The mitigation in `source`, else that of the model; None for none."""
        own = self.model.mitigation
        return split_dtype(split_spec(self.source)[1])[1] or (None if own is None else str(own))


def refuse_unfit(tokenizer: Tokenizer, model: LanguageModel, name: str = "the model") -> None:
    """Raise a UserError if the tokenizer has more ids than the model."""
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {name} has {tokenizer.vocab_size} ids and the model "
            f"{model.vocab_size}: use the tokenizer that the model was trained with"
        )


def open_checkpoint(
    source: str,
    mitigation: str | None = None,
    *,
    name: str | None = None,
    device: str | torch.device | None = None,
) -> OpenCheckpoint:
    """Load a model and its tokenizer.

    Args:
        source: `CHECKPOINT`, `CHECKPOINT+DTYPE` or either with `+MITIGATION`, as `load` takes it.
        mitigation: a mitigation in addition to that of `source`.
        name: its name in results; None for `source` with the further mitigation after a plus.
        device: None for the CPU.

    Raises:
        UserError: as `load` and `load_tokenizer`.
    """
    source = source if mitigation is None else f"{source}+{mitigation}"
    model, tokenizer = load(source, device=device), load_tokenizer(source)
    return OpenCheckpoint(name or source, model, tokenizer, source, str(device or "cpu"))
