"""`OpenCheckpoint`: a loaded model with its tokenizer and the name used in results."""

from typing import NamedTuple

import torch

from longrnn.checkpoints.load import load
from longrnn.checkpoints.names import CheckpointName
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.errors import UserError
from longrnn.models.base import LanguageModel
from longrnn.text import Tokenizer


class OpenCheckpoint(NamedTuple):
    """A model that is ready for evaluation.

    Attributes:
        name: its name in results, rows and columns.
        model: any language model, with its mitigation applied.
        tokenizer: the tokenizer of the model.
        source: what `load` opened; None for a model that was built in this process.
        device: the device of the model.
    """

    name: str
    model: LanguageModel
    tokenizer: Tokenizer
    source: CheckpointName | None = None
    device: str = "cpu"

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint, without dtype and mitigation; empty without `source`."""
        return "" if self.source is None else self.source.checkpoint

    @property
    def mitigation(self) -> str | None:
        """The mitigation in `source`, else that of the model; None for none."""
        if self.source is not None and self.source.mitigation is not None:
            return "+".join(self.source.mitigation)
        return None if self.model.mitigation is None else str(self.model.mitigation)


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
    parsed = CheckpointName.parse(source).under(mitigation)
    name = name or "+".join(filter(None, (source, mitigation)))
    model, tokenizer = load(parsed, device=device), load_tokenizer(parsed.tokenizer)
    return OpenCheckpoint(name, model, tokenizer, parsed, str(device or "cpu"))
