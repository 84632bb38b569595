"""Tasks to train on. They know nothing about models."""

from longrnn.tasks.base import TASKS, Batch, Task
from longrnn.tasks.passkey import Passkey
from longrnn.tasks.reverse import Reverse
from longrnn.tasks.text import Text

__all__ = ["TASKS", "Batch", "Passkey", "Reverse", "Task", "Text"]
