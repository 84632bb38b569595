"""Mitigations of state collapse: each an edit of the recurrence as data."""

from longrnn.mitigations.base import MITIGATIONS as MITIGATIONS
from longrnn.mitigations.base import Chain as Chain
from longrnn.mitigations.base import Mitigation as Mitigation
from longrnn.mitigations.base import NoMitigation as NoMitigation
from longrnn.mitigations.bind import Bound as Bound
from longrnn.mitigations.bind import bind as bind
from longrnn.mitigations.memory import ForgetMore as ForgetMore
from longrnn.mitigations.memory import SlidingWindow as SlidingWindow
from longrnn.mitigations.memory import StateNorm as StateNorm
from longrnn.mitigations.spec import mitigation as mitigation
from longrnn.mitigations.steps import PowerDecay as PowerDecay
from longrnn.mitigations.steps import ScaleDecay as ScaleDecay
from longrnn.mitigations.steps import ScaleDelta as ScaleDelta
from longrnn.mitigations.steps import TokenFilter as TokenFilter
from longrnn.mitigations.time_scales import TimeScales as TimeScales
