"""The gated delta rule, and that with a limit of norms."""

from functools import partial

from longrnn.ops.delta import cpu, definition, fla
from longrnn.ops.operation import Implementation, Operation, accepts

DELTA = Operation(
    "the gated delta rule",
    [
        Implementation("cpu", cpu.refusal, cpu.delta),
        Implementation("fla", fla.refusal, fla.delta, tolerance=1e-3),
        Implementation("torch", accepts, definition.delta),
    ],
    Operation(
        "the gated delta rule with a limit of norms",
        [
            Implementation("cpu", cpu.refusal, cpu.limited),
            Implementation(
                "fla", fla.refusal, partial(definition.limited, plain=fla.delta), tolerance=1e-3
            ),
            Implementation("torch", accepts, definition.limited),
        ],
    ),
)
