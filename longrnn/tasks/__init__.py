"""Tasks to train on. They know nothing about models."""

from longrnn.tasks.base import TASKS, Batch, Task
from longrnn.tasks.delayed_sum import DelayedSum
from longrnn.tasks.instruct import Instruct
from longrnn.tasks.passkey import Passkey
from longrnn.tasks.predecessor_query import PredecessorQuery
from longrnn.tasks.recall import Recall
from longrnn.tasks.reverse_dual_frequency import ReverseDualFrequency
from longrnn.tasks.reverse_variable import ReverseVariable
from longrnn.tasks.sequence import SequenceTask
from longrnn.tasks.text import Text
from longrnn.tasks.transductions import Copy, Reverse, Sort

__all__ = [
    "TASKS",
    "Batch",
    "Copy",
    "DelayedSum",
    "Instruct",
    "Passkey",
    "PredecessorQuery",
    "Recall",
    "Reverse",
    "ReverseDualFrequency",
    "ReverseVariable",
    "SequenceTask",
    "Sort",
    "Task",
    "Text",
]
