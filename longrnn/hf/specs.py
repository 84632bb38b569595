"""Parses `CHECKPOINT+MITIGATION` and applies the mitigation to a loaded model."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from longrnn.errors import UserError
from longrnn.hf.embedded import embedded
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models.recurrent import RecurrentLM

if TYPE_CHECKING:
    from longrnn.hf.adapter import HFLanguageModel

logger = logging.getLogger(__name__)

# The mitigation under which a model was trained.
TRAINED = "trained"
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

    `trained` is the mitigation under which the model was trained; a model that was trained under
    one and is used without it, or with another one, is reported by a warning. For a Hugging Face
    model, the only valid `spec` is `beyond`, which lifts its maximum length.

    Raises:
        UserError: an unknown mitigation, or one that is not defined for the model.
    """
    if isinstance(model, RecurrentLM):
        return _mitigated(model, spec)
    if spec is None:
        return model
    for one in [spec] if isinstance(spec, str) else spec:
        if one != BEYOND:
            raise UserError(
                f"{one} changes a recurrence that longrnn computes, and this {model.kind} is "
                f"computed by transformers: leave it out ('{BEYOND}', which lifts the maximum "
                "length, and --chunk-select work for any model)"
            )
    model.go_beyond()
    return model


def _mitigated(model: RecurrentLM, spec: str | Sequence[str] | None) -> RecurrentLM | Mitigated:
    """`mitigated` of a recurrent model."""
    under = model.trained_under
    if spec == TRAINED or (spec is not None and list(spec) == [TRAINED]):
        if under is None:
            raise UserError(
                f"the model was trained without a mitigation: leave {TRAINED} out, or name one"
            )
        return Mitigated(model, mitigation(under))
    found = None if spec is None else Mitigated(model, mitigation(spec))
    same = found is not None and under == found.mitigation.describe()
    if under is not None and not same:
        logger.warning(
            f"this model was trained under {under} and is used "
            f"{'without it' if found is None else f'under {found.mitigation}'}: give the "
            f"checkpoint as CHECKPOINT+{TRAINED} to use it as it was trained"
        )
    return found or model
