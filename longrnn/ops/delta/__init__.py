"""The gated delta rule, and that with a limit of norms."""

from functools import partial

from longrnn.ops.delta import cpu, definition, fla
from longrnn.ops.operation import Implementation, Operation, accepts

PLAIN = [
    Implementation("cpu", cpu.refusal, cpu.delta),
    Implementation("fla", fla.refusal, fla.delta, tolerance=1e-3),
    Implementation("torch", accepts, definition.delta),
]
DELTA = Operation(
    "the gated delta rule",
    PLAIN,
    Operation(
        "the gated delta rule with a limit of norms",
        [each._replace(run=partial(definition.limited, plain=each.run)) for each in PLAIN],
    ),
)
