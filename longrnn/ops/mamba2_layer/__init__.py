"""Everything between the projections of a Mamba-2 layer.

The operation has no implementation in torch: `longrnn.ops.mamba2_layer.definition` consists of
operations, and each of them has its own.
"""

from functools import partial

from longrnn.ops.mamba2_layer import cpu, definition, mamba_ssm
from longrnn.ops.operation import Implementation, Operation

# The demand of a layer whose gate is not a norm with the groups of B and C.
OTHER_GATE = "gate"
BY_FLA = partial(definition.layer, backend="fla")
SERVES = frozenset({OTHER_GATE})

MAMBA2_LAYER = Operation(
    "a Mamba-2 layer",
    [
        Implementation("cpu", cpu.refusal, cpu.layer),
        # Before mamba-ssm, which is less exact.
        Implementation("fla", definition.fla_refusal, BY_FLA, SERVES, 1e-3),
        Implementation("mamba_ssm", mamba_ssm.refusal, mamba_ssm.layer, SERVES, 1e-2),
    ],
)
