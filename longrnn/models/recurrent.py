"""A language model with one kind of recurrent cell."""

from dataclasses import asdict

import torch
from torch import Tensor, nn

from longrnn.cells import MIXERS, Cell
from longrnn.errors import UserError
from longrnn.imports import hash_of_users
from longrnn.models.base import check_tokens, hash_weights
from longrnn.models.blocks import Block
from longrnn.models.config import RecurrentConfig
from longrnn.models.token_stack import TokenStack
from longrnn.models.trainable import TrainableLM
from longrnn.ops.hooks import own, own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.loss import token_cross_entropy
from longrnn.ops.norm import rms_norm
from longrnn.ops.rows import Rows, positions_of
from longrnn.options import validated
from longrnn.positions import POSITIONS
from longrnn.state import LMState, PyTree

# Tokens of one segment, over all rows, on a CPU: at least this many, and as many as have this
# many numbers between two layers; chosen by measurement.
SEGMENT_TOKENS, SEGMENT_NUMBERS = 512, 2**18
# The same on other devices, where every segment costs some hundred launches per layer.
DEVICE_SEGMENT_TOKENS = 2**16
# A window is computed in blocks of its own length, up to this many tokens.
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
        return [own(block.mixer) for block in self.blocks]  # type: ignore[misc,arg-type]

    @property
    def device(self) -> torch.device:  # pyright: ignore
        """See `LanguageModel`."""
        return self.embedding.weight.device

    @property
    def like(self) -> PyTree:  # pyright: ignore
        """See `LanguageModel`."""
        return tuple(cell.like(edit) for cell, edit in zip(self.cells, self.edits, strict=True))

    def gradient_checkpointing_enable(self, enabled: bool = True) -> None:
        """Keeps the input of each block alone, which the backward pass computes again."""
        for block in self.blocks:
            block.gradient_checkpointing = enabled  # type: ignore[assignment]

    def head_input(self, vectors: Tensor, observe: list[Tensor] | None) -> Tensor:
        """See `TrainableLM`: the vectors after the last norm."""
        if self.norm is not None:
            vectors = rms_norm(vectors, own_weight(self.norm), self.config.norm_eps)
            vectors = vectors.to(self.embedding.weight.dtype) if self._wide else vectors
        if observe is not None:
            observe.append(vectors)
        return vectors

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
        positions, after = positions_of(position, tokens.shape[1], rows)
        x = self.merge(self.position(embeddings, positions))
        if rows is not None:
            x = rows.without_padding(x)
        return x.to(torch.promote_types(x.dtype, torch.float32)) if self._wide else x, after

    def segment(
        self, tokens: Tensor, state: LMState, rows: Rows | None, observe: list[Tensor] | None
    ) -> tuple[Tensor, LMState]:
        """See `TrainableLM`."""
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

    def segment_width(self, batch_size: int, time: int) -> int:
        """See `TrainableLM`.

        Longer segments cost fewer calls, and shorter ones stay in the caches of a CPU. Under a
        window they have whole blocks of its length.
        """
        if time == 1:
            return 1
        windows = [edit.window or 1 for edit in self.edits if edit is not None]
        block = min(max(windows, default=1), MAX_WINDOW_SEGMENT)
        if self.embedding.weight.device.type == "cpu":
            by_size = max(SEGMENT_TOKENS, SEGMENT_NUMBERS // self.config.d_model)
            tokens, least = min(4 * SEGMENT_TOKENS, by_size), 64
        else:
            tokens, least = DEVICE_SEGMENT_TOKENS, 1024
        tokens = max(least, tokens // max(1, batch_size))
        return max(1, tokens // block) * block

    def weights_fingerprint(self, *, rounded: bool = False) -> str:
        """See `LanguageModel`."""
        config = asdict(self.config)
        # It changes the speed of a model and not its outputs.
        config["mixer"].pop("backend", None)
        for name in NEW_OPTIONS:
            if not config[name]:
                del config[name]
        if users := hash_of_users([type(self.position), *map(type, self.cells)]):
            config["users"] = users
        return hash_weights(config, self.state_dict(), rounded=rounded)
