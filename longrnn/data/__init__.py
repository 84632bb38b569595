"""Tasks to train on, and the texts that they are made of. They know nothing about models."""

from longrnn.data import keyed as keyed
from longrnn.data import lookup as lookup
from longrnn.data import reversals as reversals
from longrnn.data import tracking as tracking
from longrnn.data.batch import TASKS as TASKS
from longrnn.data.batch import UNSCORED as UNSCORED
from longrnn.data.batch import Batch as Batch
from longrnn.data.batch import Task as Task
from longrnn.data.passkey import Passkey as Passkey
from longrnn.data.sequences import SequenceTask as SequenceTask
from longrnn.data.text import Instruct as Instruct
from longrnn.data.text import Text as Text
