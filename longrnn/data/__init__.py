"""Tasks to train on, and the texts that they are made of. They know nothing about models."""

from longrnn.data.batch import TASKS, UNSCORED, Batch, Task
from longrnn.data.lookups import PredecessorQuery, Recall
from longrnn.data.passkey import Passkey
from longrnn.data.reversals import ReverseDualFrequency, ReverseVariable
from longrnn.data.sequences import (
    Condition,
    Copy,
    DelayedSum,
    Reverse,
    SequenceTask,
    Sort,
    Transduction,
)
from longrnn.data.text import Instruct, PlainText, Text

__all__ = [
    "TASKS",
    "UNSCORED",
    "Batch",
    "Condition",
    "Copy",
    "DelayedSum",
    "Instruct",
    "Passkey",
    "PlainText",
    "PredecessorQuery",
    "Recall",
    "Reverse",
    "ReverseDualFrequency",
    "ReverseVariable",
    "SequenceTask",
    "Sort",
    "Task",
    "Text",
    "Transduction",
]
