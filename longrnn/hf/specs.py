"""A model under what is written behind the plus of `CHECKPOINT+MITIGATION`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models.recurrent import RecurrentLM

if TYPE_CHECKING:
    from longrnn.hf.adapter import HFLanguageModel

# In the place of a mitigation: a model of transformers may read more than it was made for.
BEYOND = "beyond"


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
