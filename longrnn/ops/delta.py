"""The gated delta rule: the recurrence of `longrnn.ops.scan`, in which tokens erase."""

from functools import partial

from longrnn.ops.operation import Implementation, Operation, accepts
from longrnn.ops.scan import cpu, definition, fla, limit

_fla_refusal = partial(fla.refusal, erases=True)
_limited = partial(limit.limited, erases=True)

DELTA = Operation(
    "the gated delta rule",
    [
        Implementation("cpu", cpu.refusal, partial(cpu.scan, erases=True)),
        Implementation("fla", _fla_refusal, partial(fla.scan, erases=True), tolerance=1e-3),
        Implementation("torch", accepts, partial(definition.scan, erases=True)),
    ],
    Operation(
        "the gated delta rule with a limit of norms",
        [
            Implementation("cpu", cpu.refusal, partial(cpu.limited_scan, erases=True)),
            Implementation("fla", _fla_refusal, partial(_limited, plain=fla.scan), tolerance=1e-3),
            Implementation("torch", accepts, _limited),
        ],
    ),
)
