"""Mitigations of state collapse: one per file, each an edit of the recurrence."""

from longrnn.mitigations.base import MITIGATIONS, Chain, Mitigation, NoMitigation, Stage
from longrnn.mitigations.forget_more import ForgetMore
from longrnn.mitigations.mitigated import Mitigated, MitigatedState
from longrnn.mitigations.scaling import PowerDecay, ScaleDecay, ScaleDelta
from longrnn.mitigations.sliding_window import SlidingWindow
from longrnn.mitigations.spec import mitigation
from longrnn.mitigations.state_norm import StateNorm
from longrnn.mitigations.token_filter import TokenFilter

__all__ = [
    "MITIGATIONS",
    "Chain",
    "ForgetMore",
    "Mitigated",
    "MitigatedState",
    "Mitigation",
    "NoMitigation",
    "PowerDecay",
    "ScaleDecay",
    "ScaleDelta",
    "SlidingWindow",
    "Stage",
    "StateNorm",
    "TokenFilter",
    "mitigation",
]
