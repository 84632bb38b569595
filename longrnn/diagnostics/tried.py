"""The form of the file in which a repair records its attempts, which is checked when it is read."""

from typing import Any

from pydantic import Field, FiniteFloat

from longrnn.options import Options


class Measured(Options, strict=True):
    """What is recorded of an attempt; see `Choice.rows`."""

    seconds: FiniteFloat
    members: list[dict[str, Any]]
    folds: bool
    loss: FiniteFloat
    inside: FiniteFloat
    keys: FiniteFloat


class Impossible(Options, strict=True):
    """What is recorded of an attempt that was not possible."""

    seconds: FiniteFloat
    reason: str


class LeftOut(Options, strict=True):
    """What is recorded of an attempt that was not made."""

    seconds: FiniteFloat
    left_out: str
    budget: FiniteFloat


class Tried(Options, strict=True):
    """The content of the file TRIED."""

    question: dict[str, Any]
    rows: dict[str, Measured | Impossible | LeftOut] = Field({})
    tokens: dict[str, FiniteFloat] = Field({})
