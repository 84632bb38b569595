"""Windows that end chunks while text is decoded, and the comparison of two decoders."""

from __future__ import annotations

from typing import Any

import torch

from longrnn.models.base import CapturableModel
from longrnn.models.decoding import CallingDecoder, StaticDecoder
from longrnn.state import LMState, PyTree, clone, leaves
from tests.contracts.builders import (
    assert_near,
    assert_trees_equal,
    mitigation_spec,
    random_tokens,
    spec_id,
)

TOKENS = 12
DECODERS = (CallingDecoder, StaticDecoder)


def assert_same(model: CapturableModel, start: LMState | None = None, tolerance: float = 0) -> None:
    """Both decoders, with a row that ends and goes on, from a state that was carried in.

    Args:
        model: decodes `TOKENS` tokens.
        start: of three rows; None for one after five tokens.
        tolerance: 0 for the same bits.
    """
    start = model(random_tokens(3, 5)).state if start is None else start
    given = clone(start)
    calls, static = CallingDecoder(model, start), StaticDecoder(model, start)
    done = torch.tensor([False, True, False])
    for index, tokens in enumerate(random_tokens(TOKENS, 3, seed=1)):
        kept, values = static.state, clone(static.state)
        mask = done if TOKENS // 2 < index < TOKENS - 2 else None
        live = slice(None) if mask is None else ~mask
        found, wanted = (decoder.step(tokens, mask)[live] for decoder in (static, calls))
        if tolerance == 0:
            assert_trees_equal((found, static.state), (wanted, calls.state))
        else:
            assert_trees_near((found, static.state), (wanted, calls.state), tolerance)
        assert_trees_equal(kept, values)
    assert_trees_equal(start, given)


def assert_trees_near(actual: PyTree, expected: PyTree, tolerance: float) -> None:
    ours, theirs = dict(leaves(actual)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert leaf.dtype == theirs[name].dtype, name
        assert_near(leaf, theirs[name], tolerance, name)


def window(size: int, **options: Any) -> dict[str, Any]:
    return {"kind": "sliding_window", "window": size, **options}


# Chunks that end during `TOKENS` tokens, and more than one block of chunks; windows of some layers
# and heads, and with other mitigations.
WINDOWS: list[tuple[str, list[dict[str, Any]]]] = [
    ("mamba2", [window(1)]),
    ("mamba2", [window(4, chunk=4)]),
    ("mamba2", [mitigation_spec("forget_more"), window(11, chunk=3)]),
    ("mamba2", [window(9, chunk=2, heads=[1]), mitigation_spec("token_filter")]),
    ("mamba2", [mitigation_spec("scale_delta"), window(12, chunk=3, layers=[1])]),
    ("gru", [mitigation_spec("forget_more"), window(5)]),
    ("lstm", [window(1)]),
    ("lstm", [mitigation_spec("forget_more"), window(3, layers=[1])]),
]


def window_id(case: object) -> str:
    return "-".join(map(spec_id, case)) if isinstance(case, list) else str(case)
