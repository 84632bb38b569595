"""Parses `CHECKPOINT+MITIGATION` and applies the mitigation to a loaded model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from longrnn.errors import UserError
from longrnn.hf.embedded import embedded
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models.recurrent import RecurrentLM

if TYPE_CHECKING:
    from longrnn.hf.adapter import HFLanguageModel

# In place of a mitigation: lifts the maximum length of a Hugging Face model.
BEYOND = "beyond"


def split_spec(text: str) -> tuple[str, str | None]:
    """Split `CHECKPOINT+MITIGATION` into both; the mitigation is None if there is no plus.

    The name of a folder may contain a plus, and so may the file of a calibrated mitigation: the
    checkpoint is the longest prefix that exists.
    """
    pluses = [index for index, character in enumerate(text) if character == "+"]
    for cut in (len(text), *reversed(pluses)):
        # `Path.exists` fails at names that are too long for a file.
        if text[:cut] in embedded() or os.path.exists(text[:cut]):
            break
    else:
        cut = pluses[0] if pluses else len(text)
    return text[:cut], text[cut + 1 :] if cut < len(text) else None


@overload
def mitigated(model: RecurrentLM, spec: str | Sequence[str] | None) -> RecurrentLM | Mitigated: ...


@overload
def mitigated(
    model: RecurrentLM | HFLanguageModel, spec: str | Sequence[str] | None
) -> RecurrentLM | Mitigated | HFLanguageModel: ...


def mitigated(
    model: RecurrentLM | HFLanguageModel, spec: str | Sequence[str] | None
) -> RecurrentLM | Mitigated | HFLanguageModel:
    """Return the model with the mitigation that `spec` describes; the model itself for None.

    For a Hugging Face model, the only valid `spec` is `beyond`, which lifts its maximum length.

    Raises:
        UserError: an unknown mitigation, or one that is not defined for the model.
    """
    if spec is None:
        return model
    if isinstance(model, RecurrentLM):
        return Mitigated(model, mitigation(spec))
    for one in [spec] if isinstance(spec, str) else spec:
        if one != BEYOND:
            raise UserError(
                f"{one} changes a recurrence that longrnn computes, and this {model.kind} is "
                f"computed by transformers: leave it out ('{BEYOND}', which lifts the maximum "
                "length, and --chunk-select work for any model)"
            )
    model.go_beyond()
    return model
