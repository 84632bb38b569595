"""A language model with one kind of recurrent cell.

Notable choices:
- A long input goes through all layers in segments, which give the same result as one call because
  the state is exact. Without gradients, memory is bounded by the segment and not by the length.
- Logits are computed for the kept tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from longrnn.errors import UserError, nearest
from longrnn.mixers import MIXERS, Edit, EditedState, Mixer, init_carries
from longrnn.models.base import LMOutput, fingerprint
from longrnn.models.blocks import BLOCKS, Residual, deferred
from longrnn.models.checks import check_state, check_targets, check_tokens
from longrnn.models.config import RecurrentConfig
from longrnn.models.context import ContextGroup, hidden_of_share
from longrnn.models.packing import Arrangement
from longrnn.models.recompute import RecomputedModel, recomputed
from longrnn.models.segments import segment_width
from longrnn.models.token_stack import TokenStack
from longrnn.models.vectors import ArrangedVectors, Vectors
from longrnn.ops.cross_entropy import token_cross_entropy
from longrnn.ops.hooks import own_weight
from longrnn.ops.linear import Linear
from longrnn.ops.norm import add_rms_norm
from longrnn.ops.packed_rows import PackedRows
from longrnn.positions import POSITIONS
from longrnn.ranges import check_ranges
from longrnn.state import LMState, PyTree, clone


class RecurrentLM(RecomputedModel):
    """A `LanguageModel`: embedding, positional encoding, blocks and head.

    Args:
        config: see `RecurrentConfig`.

    Attributes:
        loaded_from: the folder that the model was loaded from; None for a new one.
        trained_under: the spec of the mitigation under which the model was trained; None without.

    Raises:
        UserError: unknown kinds or options, or sizes that do not fit together.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        check_ranges(config)
        if config.block not in BLOCKS:
            raise UserError(f"unknown block {config.block!r}: {nearest(config.block, BLOCKS)}")
        self.config = config
        self.vocab_size = config.vocab_size
        self.loaded_from: str | None = None
        self.trained_under: str | None = None
        residual = config.block == "residual"
        self._wide = residual and config.residual_in_fp32
        self._token_stack = TokenStack()

        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position = POSITIONS.build(config.position, config.d_model)
        # The residual stream has width d_model; a plain cell reads the wider vector directly.
        d_first = config.d_model if residual else self.position.d_output
        self.merge = (
            Linear(self.position.d_output, config.d_model, bias=False)
            if residual and self.position.d_output != config.d_model
            else nn.Identity()
        )
        widths = [d_first] + [config.d_model] * (config.n_layers - 1)
        block = BLOCKS[config.block]
        self.blocks = nn.ModuleList(
            block(MIXERS.build(config.mixer, width, config.d_model), config) for width in widths
        )
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps) if residual else None
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=config.d_model**-0.5 if residual else 0.02)

    @property
    def max_length(self) -> int | None:
        """How many tokens a sequence may have; None for any number."""
        return self.position.n_positions

    @property
    def is_capturable(self) -> bool:
        """See `CapturableModel`."""
        return not any(mixer.reads_device for mixer in self.mixers)

    def static_state(self, state: LMState) -> LMState:
        """See `CapturableModel`."""
        return clone(state)

    def state_after(self, state: LMState, static: LMState) -> LMState:
        """See `CapturableModel`."""
        return clone(static)

    def static_tokens(self, state: LMState) -> Tensor | None:
        """See `CapturableModel`; a table of positions has an end."""
        return None if self.max_length is None else (self.max_length - state.position).clamp(min=0)

    @property
    def mixers(self) -> list[Mixer]:
        """The cells, first layer first."""
        return [block.mixer for block in self.blocks]  # type: ignore[misc]

    @property
    def mixer_kind(self) -> str:
        """The kind of the cells in the registry of mixers."""
        return self.config.mixer["kind"]

    def mixer_states(self, state: LMState) -> list[PyTree]:
        """The state of the cell of each layer."""
        return list(state.layers)

    def init_state(self, batch_size: int, edits: Sequence[Edit] | None = None) -> LMState:
        """The zero state of `batch_size` rows; with edits, `extra` holds one carry per layer."""
        device = self.embedding.weight.device
        position = torch.zeros(batch_size, dtype=torch.long, device=device)
        layers = tuple(mixer.init_state(batch_size) for mixer in self.mixers)
        carries = () if edits is None else init_carries(self.mixers, batch_size, edits)
        return LMState(position, layers, carries)

    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        edits: Sequence[Edit] | None = None,
        is_token: Tensor | None = None,
        is_document_start: Tensor | None = None,
        context: ContextGroup | None = None,
        checked: bool = False,
        vectors: Vectors | None = None,
    ) -> LMOutput:
        """Consumes tokens; see `LanguageModel`.

        Args:
            tokens: `(b, t)` int64.
            state: of the same batch; None for `init_state`.
            keep: return logits for the last `keep` tokens only, padding included; None for all.
            edits: one per layer; `extra` then holds their carries, one per layer, in the given
                and in the returned state.
            is_token: `(b, t)` bool, false at padding, which may stand anywhere in a row and have
                any id. It changes neither the state nor any other output, and its own hidden
                vectors are 0. None for no padding.
            is_document_start: `(b, t)` bool. Before such a token the state of the row, carries and
                position included, is that of `init_state`, whatever it was, NaN included. A row
                whose first token is not a start continues the given state. None for no start.
            context: the processes that hold the rows together. Tokens, masks, `keep` and logits are
                then of the share of this process, states of all: see `longrnn.models.context`.
            checked: whether ids, state and positions are known to be valid, as those of generated
                tokens are. Comparing ids with the vocabulary would wait for the device.
            vectors: what replaces embeddings and the vectors between layers; not with `context`.

        Raises:
            UserError: ids outside the vocabulary, the state of another model or batch size, a
                state without the carries of the edits, masks or vectors of another shape or dtype,
                or a document that starts at padding.
        """
        hidden, state = self.hidden(
            tokens,
            state,
            keep=keep,
            edits=edits,
            is_token=is_token,
            is_document_start=is_document_start,
            context=context,
            checked=checked,
            vectors=vectors,
        )
        return LMOutput(self.head(hidden), state)  # the module, which may have an adapter

    def hidden(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        edits: Sequence[Edit] | None = None,
        is_token: Tensor | None = None,
        is_document_start: Tensor | None = None,
        context: ContextGroup | None = None,
        checked: bool = False,
        vectors: Vectors | None = None,
    ) -> tuple[Tensor, LMState]:
        """`forward` without the head: returns the head's input, `(b, t, d)`, and the state.

        For losses that do not hold all logits at once (`longrnn.ops.cross_entropy`).
        """
        if not checked:
            tokens = check_tokens(tokens, self.vocab_size, is_token)
        if state is None:
            state = self.init_state(len(tokens), edits)
        elif not checked:
            like = tuple(mixer.state_like() for mixer in self.mixers)
            check_state(state, like, len(tokens), edits)
        time = tokens.shape[1]
        keep = time if keep is None else min(keep, time)
        if keep < 0:
            raise UserError(f"keep must be at least 0, not {keep}: give 0 for no logits")

        vectors = Vectors() if vectors is None else vectors
        vectors.check(tokens, self.config.d_model, context)
        arranged = Arrangement(tokens, is_token, is_document_start)
        if context is not None:
            given = arranged.tokens, arranged.rows, state, edits, context
            hidden, state = hidden_of_share(self, *given)
            kept = Residual(hidden).from_token(arranged.first_kept(keep))
            return self._output(kept, arranged, keep), state
        vectors_of = ArrangedVectors(vectors, arranged, time)
        return self._read(state, keep, edits, arranged, vectors_of, checked)

    @torch.no_grad()
    def token_losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: LMState | None = None,
        *,
        edits: Sequence[Edit] | None = None,
    ) -> tuple[Tensor, LMState]:
        """See `LossModel.token_losses`; `edits` as in `forward`."""
        tokens = check_tokens(tokens, self.vocab_size)
        check_targets(targets, tokens, self.vocab_size)
        hidden, state = self.hidden(tokens, state, edits=edits)
        return token_cross_entropy(hidden, own_weight(self.head), targets)[0], state

    def _read(
        self,
        state: LMState,
        keep: int,
        edits: Sequence[Edit] | None,
        arranged: Arrangement,
        vectors: ArrangedVectors,
        positions_checked: bool,
    ) -> tuple[Tensor, LMState]:
        """`hidden` of checked arguments."""
        tokens, rows = vectors.source, arranged.rows
        # What is read between layers are the vectors of all tokens at once.
        given = vectors.time if vectors.is_read else keep
        first = arranged.first_kept(given)
        width = segment_width(len(tokens), tokens.device, self.config.d_model, self.recomputation)
        width = max(1, tokens.shape[1]) if vectors.is_read else width
        kept: list[Residual] = []
        for start in range(0, tokens.shape[1], width):
            part = tokens[:, start : start + width]
            part_rows = rows.slice(start, start + width) if rows is not None else None
            run = (part, state, edits, part_rows, vectors, positions_checked)
            if self.recomputation == "segment" and not vectors.is_read:
                after, state = recomputed(self._segment, *run)
            else:
                after, state = self._segment(*run)
            unwanted = max(0, first - start)
            if unwanted < part.shape[1]:
                kept.append(after.from_token(unwanted))
        if not kept:
            return self.embedding.weight.new_zeros(len(tokens), keep, self.config.d_model), state
        one = len(kept) == 1
        after = kept[0] if one else Residual(torch.cat([each.sum() for each in kept], 1))
        hidden = self._output(after, arranged, given)
        if vectors.is_read:
            hidden = vectors.last(len(self.blocks), hidden)[:, given - keep :]
        return hidden, state

    def _output(self, after: Residual, arranged: Arrangement, keep: int) -> Tensor:
        """The input of the head, `(b, keep, d)`, from the output of the last block."""
        if self.norm is None:
            return arranged.restore(after.sum(), keep)
        dtype = self.embedding.weight.dtype if self._wide else None
        weight, eps = own_weight(self.norm), self.config.norm_eps
        return arranged.restore(add_rms_norm(*after, weight, eps, dtype=dtype)[1], keep)

    def embed(
        self, tokens: Tensor, position: Tensor, rows: PackedRows | None, *, checked: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The input of the first block, and the positions after the tokens.

        Args:
            tokens: `(b, t)` int64, or their embeddings `(b, t, d)`.
            position: `(b,)` int64, that of the first token.
            rows: where documents and padding begin; None without any.
            checked: see `PositionalEncoding.forward`.
        """
        embeddings = self.embedding(tokens) if tokens.ndim == 2 else tokens
        if rows is None:
            time = tokens.shape[1]
            positions = position[:, None] + torch.arange(time, device=tokens.device)
            after = position + time
        else:
            positions, after = rows.positions(position)
        x = self.merge(self.position(embeddings, positions, checked=checked))
        if rows is not None:
            x = rows.without_padding(x)
        return x.to(torch.promote_types(x.dtype, torch.float32)) if self._wide else x, after

    def _segment(
        self,
        tokens: Tensor,
        state: LMState,
        edits: Sequence[Edit] | None,
        rows: PackedRows | None,
        vectors: ArrangedVectors,
        positions_checked: bool,
    ) -> tuple[Residual, LMState]:
        """The residual stream after the blocks, for one segment."""
        x, position = self.embed(tokens, state.position, rows, checked=positions_checked)
        if tokens.shape[1] == 1 and edits is None and rows is None and not vectors.is_read:
            at_once = self._token_stack.run(self.blocks, x, state.layers)
            if at_once is not None:
                return Residual(at_once[0]), LMState(position, at_once[1])
        between = deferred(self.blocks, x)
        layers, carries = [], []
        for index, (block, layer) in enumerate(zip(self.blocks, state.layers, strict=True)):
            between = vectors(index, between)
            if edits is None:
                between, layer = block(between, layer, None, rows)
            else:
                before = EditedState(layer, state.extra[index])
                between, (layer, carry) = block(between, before, edits[index], rows)
                carries.append(carry)
            layers.append(layer)
        return Residual.of(between), LMState(position, tuple(layers), tuple(carries))

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the SHA-256 of configuration and weights.

        The backend is left out, because it changes the speed of a model and not its outputs.
        """
        config = asdict(self.config)
        config["mixer"].pop("backend", None)
        # This option is newer than existing calibrations, whose fingerprints lack it.
        if not config["residual_in_fp32"]:
            del config["residual_in_fp32"]
        return fingerprint(config, self.state_dict())
