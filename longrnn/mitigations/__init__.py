"""Mitigations of state collapse: one per file, each an edit of the recurrence as data."""

from __future__ import annotations

from longrnn.mitigations.base import MITIGATIONS, Chain, Mitigation, NoMitigation
from longrnn.mitigations.bind import Bound, bind
from longrnn.mitigations.forget_more import ForgetMore
from longrnn.mitigations.scaling import PowerDecay, ScaleDecay, ScaleDelta
from longrnn.mitigations.sliding_window import SlidingWindow
from longrnn.mitigations.spec import mitigation
from longrnn.mitigations.state_norm import StateNorm
from longrnn.mitigations.time_scales import TimeScales
from longrnn.mitigations.token_filter import TokenFilter

__all__ = [
    "MITIGATIONS",
    "Bound",
    "Chain",
    "ForgetMore",
    "Mitigation",
    "NoMitigation",
    "PowerDecay",
    "ScaleDecay",
    "ScaleDelta",
    "SlidingWindow",
    "StateNorm",
    "TimeScales",
    "TokenFilter",
    "bind",
    "mitigation",
]
