"""Sizes of the full benchmark and of its dry run, and the bounds of an operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from longrnn.inference.prefill import PREFILL_TOKENS
from longrnn.models.recurrent import RecurrentConfig

# Tokens of a chunk in the count of operations of the recurrence.
CHUNK = 64


@dataclass(frozen=True)
class Sizes:
    """All sizes of one run of the benchmark.

    Attributes:
        dry: whether this is the dry run, which measures no time.
        d_model: width of the model whose shapes all parts use; that of mamba2-2.7b.
        n_layers: of that model.
        vocab_size: of that model.
        mixer: of that model.
        copied: bytes of the copy that measures the ceiling of memory.
        product: rows and columns of the matrices that measure the ceiling of products.
        checked_tokens: of the comparisons with a loop over tokens.
        small_d_model: width of the models that are compared with a CPU.
        tokens: of the timed recurrence and of a prefill.
        long: of the longest call and the longer prefill.
        piece: tokens of a call where the longest one is repeated in pieces, and of the shortest
            prefill, which is one call.
        compared: last tokens that are compared after the longest call.
        window: of sliding_window.
        window_chunk: tokens per chunk of its carry in the whole model, as advised for long windows.
        decoded: tokens of the timed decoding.
        train_rows: rows of the training step.
        train_tokens: tokens per row of the training step.
        repeats: timed calls, of which the median counts.
    """

    dry: bool
    d_model: int = 2560
    n_layers: int = 64
    vocab_size: int = 50_288
    mixer: dict[str, Any] = field(
        default_factory=lambda: {"kind": "mamba2", "d_state": 128, "head_dim": 64}
    )
    copied: int = 2**31
    product: int = 8192
    checked_tokens: int = 300
    small_d_model: int = 256
    tokens: int = 65_536
    long: int = 1_048_576
    piece: int = PREFILL_TOKENS
    compared: int = 4096
    window: int = 8192
    window_chunk: int = 512
    decoded: int = 64
    train_rows: int = 8
    train_tokens: int = 8192
    repeats: int = 10

    @property
    def heads(self) -> int:
        return 2 * self.d_model // self.head_dim

    @property
    def head_dim(self) -> int:
        return self.mixer["head_dim"]

    @property
    def d_state(self) -> int:
        return self.mixer["d_state"]

    @property
    def d_inner(self) -> int:
        return 2 * self.d_model

    @property
    def d_conv_input(self) -> int:
        """Channels of the convolution: inner x, B and C."""
        return self.d_inner + 2 * self.d_state

    @property
    def config(self) -> RecurrentConfig:
        """The model of the full shape."""
        return RecurrentConfig(self.vocab_size, self.d_model, self.n_layers, self.mixer)


FULL = Sizes(dry=False)
DRY = Sizes(
    dry=True,
    d_model=32,
    n_layers=2,
    vocab_size=64,
    mixer={"kind": "mamba2", "d_state": 16, "head_dim": 16},
    copied=2**16,
    product=32,
    checked_tokens=40,
    small_d_model=32,
    tokens=64,
    long=128,
    piece=32,
    compared=32,
    window=16,
    window_chunk=8,
    decoded=4,
    train_rows=2,
    train_tokens=64,
    repeats=1,
)


class Cost(NamedTuple):
    """What an operation needs at least: `bytes` to and from memory, and `flops`."""

    bytes: float
    flops: float = 0.0

    def bound_ms(self, ceilings: dict[str, float]) -> float:
        """The least milliseconds, at the ceilings of the device."""
        return 1e3 * max(
            self.bytes / ceilings["bytes_per_second"], self.flops / ceilings["flops_per_second"]
        )


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the entries of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def scan_flops(tokens: int, heads: int, head_dim: int, d_state: int, groups: int = 1) -> float:
    """Operations of the recurrence in chunks of CHUNK tokens, forward.

    Per token and group the products of C and B; per head the weighted sum of x, the update of the
    state and its read-out; two operations for each product of numbers.
    """
    per_head = 2 * CHUNK * head_dim + 4 * head_dim * d_state
    return tokens * (groups * 2 * CHUNK * d_state + heads * per_head)
