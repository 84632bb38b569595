"""The recurrence of Mamba-1 without the decays of all keys and tokens in memory."""

from longrnn.ops.operation import Implementation, Operation
from longrnn.ops.selective import cpu

SELECTIVE_STAGES = frozenset({"steps", "keep", "add", "documents"})
# Where none of these can compute a call, it is that of `SCAN` with decays per key.
SELECTIVE = Operation(
    "the selective scan", [Implementation("cpu", cpu.refusal, cpu.selective, SELECTIVE_STAGES)]
)
