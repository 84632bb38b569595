"""The memory of a training step, computed from the shape of the model and the batch.

Tensors that live at the same time at the start of the backward pass are counted: weights, gradients
and optimizer, what the forward pass keeps, and the working memory of the largest operation. A test
compares the sum with measured peaks. What an allocator adds, and torch itself, is not included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from longrnn.errors import UserError
from longrnn.cells import Mamba2
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.models.segments import segment_width
from longrnn.ops import cross_entropy
from longrnn.ops.ssd import chunked
from longrnn.training import models
from longrnn.training.config import TrainConfig

WIDE = 4  # bytes of float32: weights, optimizer, residual stream, decays and states
BYTES = {"no": WIDE, "bf16": 2, "fp16": 2}
# Tensors of chunk × chunk per head, and of the inner width, that the scan's backward pass holds.
CHUNK_TENSORS, INNER_TENSORS = 4, 8
# Tensors of the inner width that the backward pass of the C++ cell holds beside other widths.
FUSED_TENSORS = 4
# Tensors of logits that the loss holds of one piece.
LOGITS_TENSORS = 3


class NotModelledError(UserError):
    """A valid model for which this module has no formula."""


class TrainingMemory(NamedTuple):
    """Bytes of a training step on one device.

    Attributes:
        weights: float32, and the copies that autocast makes of them.
        gradients: float32.
        optimizer: the two moments of AdamW.
        activations: what the forward pass keeps for the backward pass, of all tokens.
        working: of the largest operation; independent of the number of tokens once these exceed a
            segment.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return sum(self)


def training_memory(
    config: RecurrentConfig,
    *,
    rows: int,
    tokens: int,
    mixed_precision: str = "no",
    gradient_checkpointing: str = "no",
    shards: int = 1,
    device: str = "cpu",
) -> TrainingMemory:
    """The memory of one training step with AdamW.

    Args:
        config: the model, with `mamba2` cells in residual blocks.
        rows: per process and micro-batch.
        tokens: per row, in all segments through which one gradient flows.
        mixed_precision: `no`, `bf16` or `fp16`.
        gradient_checkpointing: `no`, `block` or `segment`.
        shards: processes over which FSDP divides weights, gradients and optimizer.
        device: `cpu` or `cuda`, which process segments and losses in pieces of different sizes.

    Raises:
        NotModelledError: another kind of model.
    """
    if config.mixer["kind"] != "mamba2" or config.block != "residual":
        raise NotModelledError(
            f"the memory of {config.mixer['kind']} cells in {config.block} blocks is not modelled: "
            "measure a step of a small batch"
        )
    with torch.device("meta"):
        model = RecurrentLM(replace(config, n_layers=1))  # all layers have the same shape
    per_layer = sum(parameter.numel() for parameter in model.blocks.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parameters += (config.n_layers - 1) * per_layer
    narrow, layers, d = BYTES[mixed_precision], config.n_layers, config.d_model
    mixer = model.cells[0]
    assert isinstance(mixer, Mamba2)
    matrices = layers * (mixer.in_proj.weight.numel() + mixer.out_proj.weight.numel())
    casts = matrices * narrow if narrow < WIDE else 0

    whole = rows * tokens
    width = segment_width(rows, torch.device(device), d, gradient_checkpointing)
    segments = -(-tokens // width)
    segment = rows * min(tokens, width)
    state = rows * (
        WIDE * mixer.n_heads * mixer.head_dim * mixer.d_state
        + WIDE * (mixer.d_conv - 1) * mixer.d_xBC
    )
    # The C++ cell of a CPU keeps less than the parts that other devices compute.
    fused = mixer.backend_on(torch.device(device)) == "native"
    stream, block = WIDE * d, _block(mixer, d, narrow, fused=fused)
    # The input of the last norm, and the gradient of the head's input.
    outside = whole * 2 * stream
    states = (segments + 1) * layers * state  # before each segment, and the last one
    if gradient_checkpointing == "segment":
        kept, again = states, segment * layers * (block + stream)
    elif gradient_checkpointing == "block":
        kept, again = whole * layers * stream + states, segment * block
    else:
        kept, again = whole * layers * (block + stream) + states, 0
    if fused:
        scan = (
            segment * WIDE * (_projected(mixer) + 2 * mixer.d_xBC + FUSED_TENSORS * mixer.d_inner)
        )
    else:
        at_once = segment
        if torch.device(device).type == "cpu":
            # Only whole chunks, and no more than a segment of the backend, are computed at once.
            span = min(tokens, width, chunked.SEGMENT)
            at_once = rows * max(min(span, chunked.CHUNK), span - span % chunked.CHUNK)
            # The input of the second projection is freed before.
            again = max(0, again - segment * narrow * mixer.d_inner)
        scan = at_once * WIDE * mixer.n_heads * min(tokens, chunked.CHUNK) * CHUNK_TENSORS
        scan += at_once * WIDE * mixer.d_inner * INNER_TENSORS
    logits = cross_entropy.most_logits(torch.device(device))
    pieces = min(whole * config.vocab_size, max(logits, config.vocab_size))
    loss = WIDE * pieces * LOGITS_TENSORS
    return TrainingMemory(
        weights=(WIDE * parameters) // shards + casts,
        gradients=(WIDE * parameters) // shards,
        optimizer=2 * (WIDE * parameters) // shards,
        activations=outside + kept,
        working=max(again + scan, loss),
    )


def _projected(mixer: Mamba2) -> int:
    """The width of the first projection's result."""
    return mixer.d_inner + mixer.d_xBC + mixer.n_heads


def _block(mixer: Mamba2, d_model: int, narrow: int, *, fused: bool) -> int:
    """Bytes per token that the backward pass of a block needs, but for the block's input."""
    # The normed input, the result of the first projection, and the inputs of the gated norm and of
    # the second projection.
    wide = d_model + _projected(mixer) + 2 * mixer.d_inner
    if fused:
        return narrow * wide
    # The result of the convolution; dt before and after softplus, and the log decay.
    return narrow * (wide + mixer.d_xBC) + WIDE * 3 * mixer.n_heads


def memory_of(config: TrainConfig) -> TrainingMemory:
    """The memory of a step of a run, on each of its devices.

    The model is divided by `shard_size`, and copied without it: a launch with shards over all
    processes is not part of the configuration.

    Raises:
        NotModelledError: the model is not a Mamba-2.
    """
    model = config.model
    if config.init_from is not None or model is None:
        trained = models.build(config)
        if not isinstance(trained, RecurrentLM):
            raise NotModelledError(
                "the memory of a Hugging Face model is not modelled: "
                "measure a step of a small batch"
            )
        model = trained.config
    rows = config.per_device_train_batch_size
    if config.batch_tokens is not None:
        rows = max(1, min(rows, config.batch_tokens // config.length.max))
    return training_memory(
        model,
        rows=rows,
        tokens=config.length.max * config.segments_per_step,
        mixed_precision=config.mixed_precision,
        gradient_checkpointing=config.gradient_checkpointing,
        shards=config.shard_size or 1,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def report(config: TrainConfig) -> str:
    """The memory of a step of a valid configuration in MiB, one line per part, or why not."""
    try:
        memory = memory_of(config)
    except NotModelledError as reason:
        return f"The configuration is valid; {reason}."
    lines = [f"{name:<12}{value / 2**20:>12,.0f} MiB" for name, value in memory._asdict().items()]
    return "\n".join([*lines, f"{'together':<12}{memory.total / 2**20:>12,.0f} MiB"])
