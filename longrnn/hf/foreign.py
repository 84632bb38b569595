"""`ForeignLM`: any causal Hugging Face language model as a `LanguageModel` with an explicit state.

Notable choices:
- A state holds the tensors of the model's cache, and every call builds a new cache from them, so
  that a state stays valid after it was used.
- Rows that have read different numbers of tokens go through the model one length at a time. This
  needs no padding, masks or made-up positions, and so is exact for every architecture.
- When a model is opened, `longrnn.hf.probe` checks that pieces and forks give what one call without
  a cache gives; any other model is refused.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.hf.cache import fill_cache, keep_cache
from longrnn.models.base import LanguageModel, LMOutput, check_tokens, hash_weights, refuse_long
from longrnn.ops.precision import without_autocast
from longrnn.ops.rows import Rows
from longrnn.programs import reason_of
from longrnn.state import LMState, PyTree

# Tokens of one piece, over all rows.
PIECE_TOKENS = 1024
# Names under which models take a cache and return it.
CACHES = ("past_key_values", "cache_params")
# Architectures known to continue a state with one token at a time only.
ONE_TOKEN = ("falcon_mamba", "jamba", "mamba", "zamba")
# The key of a configuration under which longrnn records the mitigation of training.
MITIGATION_KEY = "longrnn_mitigation"
# Keys of a configuration that do not affect what a model computes.
VOLATILE = (
    *("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"),
    MITIGATION_KEY,
)
# Rotary scalings under which the rotation of a token depends on the length of the text.
LENGTH_DEPENDENT = {"dynamic", "longrope"}


class ForeignLM(LanguageModel):
    """A causal Hugging Face model as a `LanguageModel`, for evaluation only (no gradients).

    Args:
        model: any causal language model.

    Attributes:
        kind: the `model_type` of the model's configuration.
        max_length: the maximum length of a sequence in tokens; None for no limit.
        can_go_beyond: whether the model can compute positions beyond that.
        tokens_together: whether several tokens after a state go through the model in one call.

    Raises:
        UserError: the model's cache is of a kind that cannot be forked, or does not hold everything
            that the model needs to continue, or its logits are not finite.
    """

    model: Any  # its attributes depend on the architecture

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.eval()
        self.kind: str = model.config.model_type
        self.config: Any = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = next((name for name in CACHES if name in self._accepted), None)
        self.tokens_together = bool(self.cells) or self.kind not in ONE_TOKEN
        reason = _scaling_by_length(self.config) if self._cache_name else "it takes no cache"
        if reason:
            raise self.refusal(reason)
        self._weights: dict[str, Any] = {}  # also of the copies that share them
        self._note_dtype()
        self._like: tuple[Any, PyTree] = None, ()
        limit = getattr(self.config, "max_position_embeddings", None)
        self.max_length = limit if states.histories(self.like) and limit else None
        self._table = _table_of_positions(model)
        self.can_go_beyond = self._table is None

    def refusal(self, reason: str) -> UserError:
        """Return the error for a model that cannot be evaluated."""
        return UserError(
            f"a Hugging Face {self.kind} cannot be evaluated here ({reason}): use a model whose "
            "cache can be forked"
        )

    @torch.no_grad()
    def _state_like(self) -> PyTree:
        """Return what `like` is, from the cache after a call."""
        tokens = torch.arange(8, device=self.model.device).view(2, 4) % self.vocab_size
        try:
            _, layers = self.call(tokens, (), 0, 1)
        except Exception as error:  # of `keep_cache`, or of a model that cannot be called so
            raise self.refusal(reason_of(error)) from error
        for name, leaf in states.leaves(layers):
            if leaf.shape[:1] != (2,):
                raise self.refusal(f"its cache has no batch axis first ({name})")
        rows = states.tree_map(lambda leaf: leaf[0].to("meta"), layers)
        return states.map_histories(lambda entries: entries[..., :0, :], rows)

    @property
    def like(self) -> PyTree:  # pyright: ignore
        """The state's layers for one row without its batch axis, on the meta device."""
        dtype = self._weights["dtype"]
        if self._like[0] != dtype:
            self._like = dtype, ()
            with without_autocast(self.model.get_input_embeddings().weight):
                self._like = dtype, self._state_like()
        return self._like[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # What `to`, `half` and others of nn.Module call: states have the dtype of the weights.
        super()._apply(fn, recurse)
        self._note_dtype()
        return self

    def _note_dtype(self) -> None:
        self._weights["dtype"] = self.model.dtype
        if self.model.dtype == torch.float64:
            # The other implementations are not written for it.
            self.model.config._experts_implementation = "eager"

    def init_state(self, batch_size: int) -> LMState:
        """Return the state before the first token, with empty histories."""
        zeros = partial(torch.zeros, device=self.model.device)
        layers = states.tree_map(lambda x: zeros(batch_size, *x.shape, dtype=x.dtype), self.like)
        return LMState(zeros(batch_size, dtype=torch.long), layers)

    def beyond(self) -> Self:
        """Return the model without `max_length`; it shares its weights with this one.

        Raises:
            UserError: the model has no positions beyond `max_length`.
        """
        if self.max_length is not None and not self.can_go_beyond:
            raise UserError(
                f"this {self.kind} has {self.max_length:,} positions ({self._table}) and none "
                "beyond: give it shorter texts"
            )
        other = copy.copy(self)
        other.max_length = None
        return other

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        rows: Rows | None = None,
    ) -> LMOutput:
        """Process tokens; see `LanguageModel`.

        Raises:
            UserError: ids outside the vocabulary, a state of another model or batch size, more
                tokens than `max_length`, or padded or packed rows.
        """
        if rows is not None:
            raise UserError(
                f"this {self.kind} is run through transformers, where padding and packed documents "
                "would enter its cache: give rows of one document and of one length"
            )
        tokens = check_tokens(tokens, self.vocab_size)
        state = self.init_state(len(tokens)) if state is None else state
        states.check(state, self.like, len(tokens))
        time = tokens.shape[1]
        keep = time if keep is None else min(keep, time)
        if not tokens.numel():
            return LMOutput(self._no_logits(len(tokens)), state)
        positions = state.position.tolist()
        refuse_long(self, max(positions) + time)

        groups: dict[int, list[int]] = {}
        for row, position in enumerate(positions):
            groups.setdefault(position, []).append(row)
        if len(groups) == 1:
            return self.read(tokens, state, positions[0], keep)
        outputs = [
            self.read(tokens[rows], states.take(state, rows), position, keep)
            for position, rows in groups.items()
        ]
        order = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
        logits = torch.cat([output.logits for output in outputs])
        after = states.take(states.join([output.state for output in outputs]), order)
        return LMOutput(logits[order.to(logits.device)], after)

    def read(self, tokens: Tensor, state: LMState, position: int, keep: int) -> LMOutput:
        """Process rows that have all read `position` tokens, in pieces; see `forward`."""
        # Drop the padding that rows with a longer history left in front.
        layers = states.map_histories(
            lambda entries: entries[..., max(0, entries.shape[-2] - position) :, :], state.layers
        )
        kept = [] if keep else [self._no_logits(len(tokens))]
        start, time = 0, tokens.shape[1]
        while start < time:
            apart = not self.tokens_together and position + start > 0
            width = 1 if apart else max(16, PIECE_TOKENS // len(tokens))
            piece = tokens[:, start : start + width]
            wanted = min(piece.shape[1], max(0, keep - (time - start - piece.shape[1])))
            logits, layers = self.call(piece, layers, position + start, max(1, wanted))
            start += piece.shape[1]
            if wanted:
                kept.append(logits[:, -wanted:])
        logits = torch.cat(kept, 1) if len(kept) > 1 else kept[0]
        return LMOutput(logits, LMState(state.position + time, layers))

    def call(
        self, tokens: Tensor, layers: PyTree, position: int, keep: int
    ) -> tuple[Tensor, tuple[PyTree, ...]]:
        """Call the model once.

        Args:
            tokens: `(b, t)`, t >= 1.
            layers: of the state after `position` tokens; ignored if that is 0.
            position: number of tokens that every row has read.
            keep: at least 1.

        Returns:
            Logits of at least the last `keep` tokens, and the layers after all tokens.

        Raises:
            ValueError: the model returned no cache, or a cache of an unknown kind.
        """
        cache = None
        if position:
            cache = DynamicCache(config=self.model.config)
            fill_cache(cache, layers, position)
        given = {self._cache_name: cache, "use_cache": True}
        if "logits_to_keep" in self._accepted:
            given["logits_to_keep"] = keep
        if "position_ids" in self._accepted:  # which some models count wrong themselves
            steps = torch.arange(position, position + tokens.shape[1], device=tokens.device)
            given["position_ids"] = steps.expand(len(tokens), -1)
        output = self.model(input_ids=tokens, return_dict=True, **given)
        return output.logits, keep_cache(output.get(self._cache_name))

    def _no_logits(self, batch_size: int) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        return weight.new_zeros(batch_size, 0, self.vocab_size)

    def weights_fingerprint(self) -> str:
        """See `LanguageModel`."""
        config = self.model.config.to_dict()
        kept = {name: value for name, value in config.items() if name not in VOLATILE}
        return hash_weights(kept, self.model.state_dict())


def _scaling_by_length(config: Any) -> str | None:
    """Returns why cached keys would change with the length of a text; None if they do not."""
    rotary = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rotary.values() if isinstance(value, dict)]
    kinds = {options.get("rope_type") for options in (rotary, *nested)} & LENGTH_DEPENDENT
    return f"its rotary positions are scaled by the length, {kinds.pop()}" if kinds else None


def _table_of_positions(model: Any) -> str | None:
    """Return the name of a table of position embeddings; None if positions are computed.

    In a causal language model, every embedding that is not of tokens is of positions.
    """
    tokens = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module not in tokens:
            return name
    names = (name for name, _ in model.named_buffers())
    return next((name for name in names if name.endswith("embed_positions")), None)
