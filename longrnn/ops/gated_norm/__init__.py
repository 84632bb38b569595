"""The gated norm after the recurrence of a Mamba-2 layer."""

from longrnn.ops.gated_norm import cpu, definition
from longrnn.ops.operation import Implementation, Operation, accepts

GATED_NORM = Operation(
    "the gated norm",
    [
        Implementation("cpu", cpu.refusal, cpu.gated_rms_norm),
        Implementation("torch", accepts, definition.gated_rms_norm),
    ],
)
