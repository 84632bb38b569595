"""The recurrence of cells without the delta rule, with a limit of norms, and with a window."""

from functools import partial

from longrnn.ops.operation import Implementation, Operation, accepts
from longrnn.ops.scan import cpu, definition, fla, limit, mamba_ssm, window

SCAN = Operation(
    "the recurrence",
    [
        Implementation("cpu", cpu.refusal, cpu.scan),
        Implementation("fla", fla.refusal, fla.scan, tolerance=1e-3),
        # After fla, which is more exact.
        Implementation("mamba_ssm", mamba_ssm.refusal, mamba_ssm.scan, tolerance=1e-2),
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
    Operation(
        "the recurrence over a window",
        [
            Implementation("cpu", lambda inputs, *others: cpu.refusal(inputs), cpu.windowed_scan),
            Implementation(
                "fla",
                lambda inputs, *others: fla.refusal(inputs),
                partial(window.windowed, scan=fla.scan),
                tolerance=1e-3,
            ),
            Implementation("torch", accepts, window.windowed),
        ],
    ),
)
