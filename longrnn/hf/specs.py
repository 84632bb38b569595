"""`CHECKPOINT+MITIGATION`: the text taken apart, and a model under what follows the plus."""

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

# In the place of a mitigation: a model of transformers may read more than it was made for.
BEYOND = "beyond"


def split_spec(text: str) -> tuple[str, str | None]:
    """Name of the checkpoint and mitigation of `CHECKPOINT+MITIGATION`; None without a plus.

    A folder may have a plus in its name, and so may the file of a calibrated mitigation: the
    longest beginning that exists is the checkpoint.
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
    """The model under the mitigation that `spec` describes; without one, the model itself.

    For a model of transformers, `beyond` lifts its maximum length, and there is nothing else.

    Raises:
        UserError: no such mitigation, or one that is not defined for the model.
    """
    if spec is None:
        return model
    if isinstance(model, RecurrentLM):
        return Mitigated(model, mitigation(spec))
    for one in [spec] if isinstance(spec, str) else spec:
        if one != BEYOND:
            raise UserError(
                f"{one} changes the recurrence of a model of ours, and this {model.kind} is run by "
                f"transformers: leave it out ('{BEYOND}', which lifts the maximum length, and "
                "--chunk-select are there for any model)"
            )
    model.go_beyond()
    return model
