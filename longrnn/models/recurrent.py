"""A language model with one kind of recurrent cell.

Notable choices:
- A long input goes through all layers in segments, which give the same result as one call because
  the state is exact. Without gradients, memory is bounded by the segment and not by the length.
- Logits are computed for the kept tokens only.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor, nn

from longrnn.cells import MIXERS, Cell
from longrnn.errors import UserError
from longrnn.models.base import LMOutput, check_tokens, hash_weights
from longrnn.models.blocks import Block
from longrnn.models.config import RecurrentConfig
from longrnn.models.token_stack import TokenStack
from longrnn.models.trainable import TrainableLM
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.loss import token_cross_entropy
from longrnn.ops.norm import rms_norm
from longrnn.ops.rows import Rows
from longrnn.options import validated
from longrnn.positions import POSITIONS
from longrnn.state import LMState, check

# Tokens of one segment, over all rows, on a CPU: at least so many, and as many as have so many
# numbers between two layers; chosen by measurement.
SEGMENT_TOKENS, SEGMENT_NUMBERS = 512, 2**18
# The same on other devices, where every segment costs some hundred launches per layer.
DEVICE_SEGMENT_TOKENS = 2**16
# A window is computed in blocks of its own length, up to so many tokens.
MAX_WINDOW_SEGMENT = 2**14
# Options that are newer than existing calibrations, whose fingerprints lack them.
NEW_OPTIONS = ("residual_in_fp32", "head_bias", "d_embedding")


class RecurrentLM(TrainableLM):
    """A `LanguageModel`: embedding, positional encoding, blocks and head.

    Args:
        config: see `RecurrentConfig`.

    Attributes:
        loaded_from: the folder that the model was loaded from; None for a new model.

    Raises:
        UserError: unknown kinds or options, or sizes that do not fit together.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        validated(RecurrentConfig, asdict(config), "model")
        self.config = config
        self.vocab_size = config.vocab_size
        self.loaded_from: str | None = None
        residual = config.block == "residual"
        self._wide = residual and config.residual_in_fp32
        self._token_stack = TokenStack()

        d_embedding = config.d_embedding or config.d_model
        if config.tie_embeddings and d_embedding != config.d_model:
            raise UserError(
                f"a head of width {config.d_model} cannot share the weights of an embedding of "
                f"width {d_embedding}: set tie_embeddings to false, or leave d_embedding out"
            )
        self.embedding = nn.Embedding(config.vocab_size, d_embedding)
        self.position = POSITIONS.build(config.position, d_embedding)
        self.max_length = self.position.n_positions
        # The residual stream has width d_model; a plain cell reads the wider vector directly.
        d_first = config.d_model if residual else self.position.d_output
        self.merge = (
            Linear(self.position.d_output, config.d_model, bias=False)
            if residual and self.position.d_output != config.d_model
            else nn.Identity()
        )
        widths = [d_first] + [config.d_model] * (config.n_layers - 1)
        self.blocks = nn.ModuleList(
            Block(MIXERS.build(config.mixer, width, config.d_model), config) for width in widths
        )
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps) if residual else None
        self.head = Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=config.d_model**-0.5 if residual else 0.02)
        if config.head_bias:
            nn.init.zeros_(self.head.bias)

    @property
    def has_positions(self) -> bool:
        return self.config.position["kind"] != "none"

    @property
    def cells(self) -> list[Cell]:
        """The cells, first layer first."""
        return [block.mixer for block in self.blocks]  # type: ignore[misc]

    def init_state(self, batch_size: int) -> LMState:
        """The state of `batch_size` rows before the first token."""
        device = self.embedding.weight.device
        position = torch.zeros(batch_size, dtype=torch.long, device=device)
        pairs = zip(self.cells, self.edits, strict=True)
        return LMState(position, tuple(cell.init_state(batch_size, edit) for cell, edit in pairs))

    def check_state(self, state: LMState, batch_size: int) -> None:
        """Raises a UserError for a state of another model, mitigation or batch size."""
        pairs = zip(self.cells, self.edits, strict=True)
        check(state, tuple(cell.like(edit) for cell, edit in pairs), batch_size)

    def gradient_checkpointing_enable(self, enabled: bool = True) -> None:
        """Keeps the input of each block alone, which the backward pass computes again."""
        for block in self.blocks:
            block.gradient_checkpointing = enabled  # type: ignore[assignment]

    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        rows: Rows | None = None,
    ) -> LMOutput:
        """Consumes tokens; see `LanguageModel.forward`. Hidden vectors at padding are 0."""
        hidden, state = self.hidden(tokens, state, keep=keep, rows=rows)
        return LMOutput(self.logits(hidden), state)

    def hidden(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        rows: Rows | None = None,
        observe: list[Tensor] | None = None,
    ) -> tuple[Tensor, LMState]:
        """See `TrainableLM.hidden`."""
        embedded = isinstance(tokens, Tensor) and tokens.is_floating_point() and tokens.ndim == 3
        if not embedded:
            tokens = check_tokens(tokens, self.vocab_size, rows)
        if state is not None:
            self.check_state(state, len(tokens))
        after = self.init_state(len(tokens)) if state is None else state
        time = tokens.shape[1]
        keep = time if keep is None else min(keep, time)
        source = tokens if rows is None else rows.arrange(tokens)
        first = time - keep if rows is None else rows.first_kept(keep)
        part_of = None if rows is None else rows.slice(0, source.shape[1])
        width, kept = 1 if time == 1 else self._segment_width(len(tokens)), []
        if observe is not None:  # all tokens in one segment
            width = max(1, source.shape[1])
        for start in range(0, source.shape[1], width):
            part = source[:, start : start + width]
            part_rows = None if part_of is None else part_of.slice(start, start + width)
            hidden, after = self._segment(part, after, part_rows, observe)
            if start + width > first:  # even an empty view would hold the segment's memory
                kept.append(hidden[:, max(0, first - start) :])
        if not kept:
            return self.embedding.weight.new_zeros(len(tokens), keep, self.config.d_model), after
        hidden = torch.cat(kept, dim=1) if len(kept) > 1 else kept[0]
        hidden = self.normed(hidden)
        if observe is not None:
            # Not a slice where all are kept: what is returned then has a gradient itself.
            last = [vectors[:, first:] for vectors in observe] if first else observe
            observe[:] = [*last, hidden]
        if rows is None:
            return hidden, after
        if observe is not None:
            observe[:] = [rows.restore(vectors, keep) for vectors in observe]
        return rows.restore(hidden, keep), after

    def normed(self, x: Tensor) -> Tensor:
        """The head's input from the output of the last block."""
        if self.norm is None:
            return x
        hidden = rms_norm(x, own_weight(self.norm), self.config.norm_eps)
        return hidden.to(self.embedding.weight.dtype) if self._wide else hidden

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, state: LMState | None = None
    ) -> tuple[Tensor, LMState]:
        """See `LanguageModel.token_losses`; logits are not rounded to the dtype of the weights."""
        tokens = check_tokens(tokens, self.vocab_size)
        hidden, state = self.hidden(tokens, state)
        return token_cross_entropy(*self.logit_factors(hidden), targets)[0], state

    def embed(self, tokens: Tensor, position: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
        """The input of the first block, and the positions after the tokens.

        Args:
            tokens: `(b, t)` int64, or their embeddings `(b, t, d)`.
            position: `(b,)` int64, that of the first token.
            rows: where documents and padding begin; None without any.
        """
        embeddings = self.embedding(tokens) if tokens.ndim == 2 else tokens
        if rows is None:
            time = tokens.shape[1]
            positions = position[:, None] + torch.arange(time, device=tokens.device)
            after = position + time
        else:
            positions, after = rows.positions(position)
        x = self.merge(self.position(embeddings, positions))
        if rows is not None:
            x = rows.without_padding(x)
        return x.to(torch.promote_types(x.dtype, torch.float32)) if self._wide else x, after

    def _segment(
        self, tokens: Tensor, state: LMState, rows: Rows | None, observe: list[Tensor] | None
    ) -> tuple[Tensor, LMState]:
        """The residual stream after the blocks, for one segment; see `hidden`."""
        x, position = self.embed(tokens, state.position, rows)
        if rows is None and observe is None:
            stacked = self._token_stack.run(self.blocks, x, state.layers, self._edits)
            if stacked is not None:
                return stacked[0], LMState(position, stacked[1])
        layers = []
        for block, layer, edit in zip(self.blocks, state.layers, self.edits, strict=True):
            if observe is not None:
                observe.append(x)
            x, layer = block(x, layer, edit, rows)
            layers.append(layer)
        return x, LMState(position, tuple(layers))

    def _segment_width(self, batch_size: int) -> int:
        """How many tokens of each row go through all layers together.

        Longer segments cost fewer calls, and shorter ones stay in the caches of a CPU. Under a
        window they have whole blocks of its length.
        """
        windows = [edit.window or 1 for edit in self.edits if edit is not None]
        block = min(max(windows, default=1), MAX_WINDOW_SEGMENT)
        if self.embedding.weight.device.type == "cpu":
            by_size = max(SEGMENT_TOKENS, SEGMENT_NUMBERS // self.config.d_model)
            tokens, least = min(4 * SEGMENT_TOKENS, by_size), 64
        else:
            tokens, least = DEVICE_SEGMENT_TOKENS, 1024
        tokens = max(least, tokens // max(1, batch_size))
        return max(1, tokens // block) * block

    def weights_fingerprint(self) -> str:
        """See `LanguageModel`."""
        config = asdict(self.config)
        # It changes the speed of a model and not its outputs.
        config["mixer"].pop("backend", None)
        for name in NEW_OPTIONS:
            if not config[name]:
                del config[name]
        return hash_weights(config, self.state_dict())
