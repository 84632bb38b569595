# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""Device functions and tile sizes that the Triton kernels share.

Notable choices:
- Sums are kept in the dtype of the state, float32 or float64 (`ACC`).
- Products of tensors that were loaded in bfloat16 run on tensor cores. An operand that a kernel
  computes has more digits than bfloat16; `MODE` says how many of them a product uses:
  `FULL` all digits of float32, as three products in TF32, or of float64;
  `ONE` rounded to the dtype of the inputs, for training;
  `TWO` as the sum of two numbers of that dtype, for evaluation.
- The position of a token is computed once per chunk in 64 bits, and offsets inside a tile in 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

FULL, ONE, TWO = (tl.constexpr(mode) for mode in range(3))
# The smallest side of a tile that `tl.dot` takes.
LEAST_TILE = 16


def tile(size: int) -> int:
    """The side of a tile that holds `size` entries."""
    return max(LEAST_TILE, triton.next_power_of_2(size))


@triton.jit
def product(a, b, ACC: tl.constexpr, NARROW: tl.constexpr, MODE: tl.constexpr):
    """a @ b in `ACC`.

    Args:
        a: `(i, k)`, in `NARROW` as it was loaded, or in `ACC` as it was computed.
        b: `(k, j)`, likewise.
        ACC: float32 or float64.
        NARROW: dtype of the operands of tensor cores in the modes ONE and TWO.
        MODE: see above.
    """
    if MODE == FULL:
        return tl.dot(a.to(ACC), b.to(ACC), input_precision="tf32x3", out_dtype=ACC)
    high_a, high_b = a.to(NARROW), b.to(NARROW)
    out = tl.dot(high_a, high_b, out_dtype=ACC)
    if MODE == TWO:
        if a.dtype != NARROW:
            out = tl.dot((a - high_a.to(ACC)).to(NARROW), high_b, out, out_dtype=ACC)
        if b.dtype != NARROW:
            out = tl.dot(high_a, (b - high_b.to(ACC)).to(NARROW), out, out_dtype=ACC)
    return out
