"""The short causal convolution before a recurrence."""

from longrnn.ops.conv import cpu, definition
from longrnn.ops.operation import Implementation, Operation, accepts

CONV = Operation(
    "the convolution",
    [
        Implementation("cpu", cpu.refusal, cpu.conv),
        Implementation("torch", accepts, definition.conv),
    ],
)
