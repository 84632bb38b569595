"""The recurrence of cells without the delta rule, and that with a limit of norms."""

from functools import partial

from longrnn.ops.operation import Implementation, Operation, accepts
from longrnn.ops.scan import cpu, definition, fla, limit

SCAN = Operation(
    "the recurrence",
    [
        Implementation("cpu", cpu.refusal, cpu.scan),
        Implementation("fla", fla.refusal, fla.scan, tolerance=1e-3),
        Implementation("torch", accepts, definition.scan),
    ],
    Operation(
        "the recurrence with a limit of norms",
        [
            Implementation("cpu", cpu.refusal, cpu.limited_scan),
            Implementation(
                "fla", fla.refusal, partial(limit.limited, plain=fla.scan), tolerance=1e-3
            ),
            Implementation("torch", accepts, limit.limited),
        ],
    ),
)
