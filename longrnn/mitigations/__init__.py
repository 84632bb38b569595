"""Mitigations of state collapse: one per file, each an edit of the recurrence as data."""

from longrnn.mitigations.base import MITIGATIONS as MITIGATIONS
from longrnn.mitigations.base import Chain as Chain
from longrnn.mitigations.base import Mitigation as Mitigation
from longrnn.mitigations.base import NoMitigation as NoMitigation
from longrnn.mitigations.bind import Bound as Bound
from longrnn.mitigations.bind import bind as bind
from longrnn.mitigations.forget_more import ForgetMore as ForgetMore
from longrnn.mitigations.scaling import PowerDecay as PowerDecay
from longrnn.mitigations.scaling import ScaleDecay as ScaleDecay
from longrnn.mitigations.scaling import ScaleDelta as ScaleDelta
from longrnn.mitigations.sliding_window import SlidingWindow as SlidingWindow
from longrnn.mitigations.spec import mitigation as mitigation
from longrnn.mitigations.state_norm import StateNorm as StateNorm
from longrnn.mitigations.time_scales import TimeScales as TimeScales
from longrnn.mitigations.token_filter import TokenFilter as TokenFilter
