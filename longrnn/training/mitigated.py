"""Training under a mitigation: the recurrence that runs at inference is the one that is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from longrnn.errors import UserError
from longrnn.mitigations import Mitigated, mitigation
from longrnn.mixers import Edit, init_carries
from longrnn.models import RecurrentLM
from longrnn.state import leaves
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.models import Trained


class Edits(NamedTuple):
    """The mitigation of a run.

    Attributes:
        spec: describes it without reference to files, so that it is defined for other weights.
        layers: the edit of each layer.
    """

    spec: str
    layers: Sequence[Edit]


def edits_of(model: Trained, spec: Any) -> Edits | None:
    """The edits of `mitigation` in a configuration; None without one.

    Calibrated numbers and the heads of a diagnosis are those of the weights at the start, and stay.

    Raises:
        UserError: the mitigation is unknown, or not defined for the model.
    """
    if spec is None or spec == "none":
        return None
    if not isinstance(model, RecurrentLM):
        raise UserError(
            "transformers computes this model in training, without mitigations: leave mitigation "
            "out, and apply one to the trained model"
        )
    whole = Mitigated(model, mitigation(spec))
    return Edits(whole.spec(), whole.edits)


def record_mitigation(model: Trained, edits: Edits | None, say: Callable[[str], None]) -> None:
    """Makes the mitigation of a run the one under which its model counts as trained.

    Args:
        model: as the run starts; `trained_under` is still that of its checkpoint.
        edits: the mitigation of the run.
        say: receives one line if it is not the one under which the checkpoint was trained.
    """
    if not isinstance(model, RecurrentLM):
        return
    before, now = model.trained_under, None if edits is None else edits.spec
    if before is not None and before != now:
        instead = "without it" if now is None else f"under {now}"
        say(
            f"the model was trained under {before}, and this run trains {instead}: set "
            f"mitigation={before!r} to train it as before"
        )
    model.trained_under = now


def check_initial_state(model: Trained, edits: Edits | None, kind: str) -> None:
    """Refuses noise as an initial state of a mitigation that remembers tokens.

    Raises:
        UserError: such a combination.
    """
    if edits is None or INITIAL_STATES[kind].whole_states:
        return
    assert isinstance(model, RecurrentLM)
    if any(True for _ in leaves(init_carries(model.mixers, 1, edits.layers))):
        raise UserError(
            f"initial_state={kind} draws states without the tokens that {edits.spec} remembers: "
            "set initial_state={kind: pass} or {kind: zero}"
        )
