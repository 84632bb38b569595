"""A checkpoint opened for evaluation: the model with its tokenizer, under one name."""

from __future__ import annotations

from typing import NamedTuple

import torch

from longrnn.errors import UserError
from longrnn.hf.loading import load
from longrnn.hf.specs import mitigated, split_spec
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.mitigations import Mitigated
from longrnn.models.base import LanguageModel
from longrnn.text import Tokenizer


class OpenCheckpoint(NamedTuple):
    """A model that is ready to be measured.

    Attributes:
        name: what results, rows and columns call it.
        model: any language model, under its mitigation.
        tokenizer: that of the model.
        source: what `load` and `load_tokenizer` open again in another process; empty for a model
            that was made in this one.
        mitigation: what `source` names behind its plus, and further ones; None for a plain model.
        device: where the model is.
    """

    name: str
    model: LanguageModel
    tokenizer: Tokenizer
    source: str = ""
    mitigation: str | None = None
    device: str = "cpu"

    @property
    def checkpoint(self) -> str:
        """`source` without its mitigation."""
        return split_spec(self.source)[0]

    def refuse_unfit(self) -> None:
        """Raises a UserError where the tokenizer has more ids than the model."""
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise UserError(
                f"the tokenizer of {self.name} has {self.tokenizer.vocab_size} ids and the model "
                f"{self.model.vocab_size}: use the tokenizer that the model was trained with"
            )


def open_checkpoint(
    source: str,
    mitigation: str | None = None,
    *,
    name: str | None = None,
    device: str | torch.device | None = None,
) -> OpenCheckpoint:
    """Loads a model and its tokenizer.

    Args:
        source: `CHECKPOINT` or `CHECKPOINT+MITIGATION`, as `load` takes it.
        mitigation: a further one, in addition to that of `source`.
        name: what to call it; None for `source` and the further mitigation.
        device: None for the CPU.

    Raises:
        UserError: as `load` and `load_tokenizer`.
    """
    checkpoint, own = split_spec(source)
    specs = [spec for spec in (own, mitigation) if spec is not None]
    plain = load(checkpoint, device=device)
    assert not isinstance(plain, Mitigated)  # the name has no mitigation left
    model = mitigated(plain, specs or None)
    label = "+".join(filter(None, (source, mitigation)))
    return OpenCheckpoint(
        label if name is None else name,
        model,
        load_tokenizer(checkpoint),
        source,
        "+".join(specs) or None,
        str(device or "cpu"),
    )
