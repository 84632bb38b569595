"""The recurrence without and with the delta rule, with a limit of norms, and with a window."""

from functools import partial

from longrnn.ops.operation import Implementation, Operation, accepts
from longrnn.ops.scan import cpu, definition, fla, limit, mamba_ssm, window


def _operation(name: str, *, erases: bool) -> Operation:
    """The recurrence and that with a limit; see `longrnn.ops.scan.definition.scan`."""
    fla_refusal = partial(fla.refusal, erases=erases)
    limited = partial(limit.limited, erases=erases)
    return Operation(
        name,
        [
            Implementation("cpu", cpu.refusal, partial(cpu.scan, erases=erases)),
            Implementation("fla", fla_refusal, partial(fla.scan, erases=erases), tolerance=1e-3),
            Implementation("torch", accepts, partial(definition.scan, erases=erases)),
        ],
        Operation(
            f"{name} with a limit of norms",
            [
                Implementation("cpu", cpu.refusal, partial(cpu.limited_scan, erases=erases)),
                Implementation("fla", fla_refusal, partial(limited, plain=fla.scan), 1e-3),
                Implementation("torch", accepts, limited),
            ],
        ),
    )


DELTA = _operation("the gated delta rule", erases=True)
SCAN = _operation("the recurrence", erases=False)._replace(
    windowed=Operation(
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
    )
)
# After fla, which is more exact.
SCAN.implementations.insert(
    2, Implementation("mamba_ssm", mamba_ssm.refusal, mamba_ssm.scan, tolerance=1e-2)
)
