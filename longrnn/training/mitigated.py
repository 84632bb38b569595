"""Training under a mitigation: the recurrence that runs at inference is the one that is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longrnn.errors import UserError
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentLM
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.models import Trained


def under(model: Trained, spec: Any) -> Trained:
    """The model under the `mitigation` of a configuration; itself without one.

    Calibrated numbers and the heads of a diagnosis are those of the weights at the start, and stay:
    the mitigation of the result refers to no file.

    Raises:
        UserError: the mitigation is unknown, or not defined for the model.
    """
    if spec is None or spec == "none":
        return model
    if not isinstance(model, RecurrentLM):
        raise UserError(
            "transformers computes this model in training, without mitigations: leave mitigation "
            "out, and apply one to the trained model"
        )
    return model.under(mitigation(spec))


def spec_of(model: Trained) -> str | None:
    """The spec of the mitigation under which a model computes; None without one."""
    return None if model.mitigation is None else model.mitigation.describe()


def record_mitigation(model: Trained, say: Callable[[str], None]) -> None:
    """Makes the mitigation of a run the one under which its model counts as trained.

    Args:
        model: as the run starts; `trained_under` is still that of its checkpoint.
        say: receives one line if it is not the one under which the checkpoint was trained.
    """
    if not isinstance(model, RecurrentLM):
        return
    before, now = model.trained_under, spec_of(model)
    if before is not None and before != now:
        instead = "without it" if now is None else f"under {now}"
        say(
            f"the model was trained under {before}, and this run trains {instead}: set "
            f"mitigation={before!r} to train it as before"
        )
    model.trained_under = now


def check_initial_state(model: Trained, kind: str) -> None:
    """Refuses noise as an initial state of a mitigation that remembers tokens.

    Raises:
        UserError: such a combination.
    """
    if model.mitigation is None or INITIAL_STATES[kind].whole_states:
        return
    if any(edit is not None and edit.window is not None for edit in model.edits):
        raise UserError(
            f"initial_state={kind} draws states without the tokens that {spec_of(model)} "
            "remembers: set initial_state={kind: pass} or {kind: zero}"
        )
