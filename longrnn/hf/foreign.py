"""`ForeignLM`: any causal Hugging Face language model as a `LanguageModel` with an explicit state.

Notable choices:
- A state holds the tensors of the model's cache, and every call builds a new cache from them.
- Rows that have read different numbers of tokens go through the model one length at a time. This
  needs no padding, masks or made-up positions, and so is exact for every architecture.
- When a model is opened, `longrnn.hf.probe` checks that pieces and forks give what one call without
  a cache gives; any other model is refused.
"""

import copy
import inspect
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from longrnn import state as states
from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow
from longrnn.hf.cache import UncutCache, fill_cache, keep_cache
from longrnn.hf.positions import scaling_by_length, table_of_positions
from longrnn.hf.probe import probe
from longrnn.hf.windowed import WindowedAttention, checked_window, no_window
from longrnn.models.base import LanguageModel, LMOutput, check_tokens, hash_weights, refuse_long
from longrnn.ops.precision import without_autocast
from longrnn.ops.rows import Rows
from longrnn.programs import reason_of
from longrnn.state import LMState, PyTree

# Tokens of one call of a model, over all rows.
CALL_TOKENS = 1024
CACHES = ("past_key_values", "cache_params")  # names under which models take and return one
# The key of a configuration under which longrnn records the mitigation of training.
MITIGATION_KEY = "longrnn_mitigation"
# Keys of a configuration that do not affect what a model computes.
VOLATILE = (
    *("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"),
    MITIGATION_KEY,
)


class ForeignLM(LanguageModel):
    """A causal Hugging Face model as a `LanguageModel`, for evaluation only (no gradients).

    Args:
        model: any causal language model.

    Attributes:
        kind: the `model_type` of the model's configuration.
        max_length: the maximum length of a sequence in tokens; None for no limit.
        table: the name of a table of positions, beyond which there are none; None without.
        attention: what computes its attention under an `attention_window`; None without.

    Raises:
        UserError: the model's cache is of a kind that cannot be forked, or does not hold everything
            that the model needs to continue, or its logits are not finite.
    """

    model: Any  # its attributes depend on the architecture
    attention: WindowedAttention | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.eval()
        self.kind: str = model.config.model_type
        self.config: Any = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = next((name for name in CACHES if name in self._accepted), None)
        reason = scaling_by_length(self.config) if self._cache_name else "it takes no cache"
        if reason:
            raise self.refusal(reason)
        self._like: tuple[Any, PyTree] = None, ()
        limit = getattr(self.config, "max_position_embeddings", None)
        self.max_length = limit if limit and self.has_keys else None
        self.table = table_of_positions(model)

    def refusal(self, reason: str) -> UserError:
        """Return the error for a model that cannot be evaluated."""
        return UserError(
            f"a Hugging Face {self.kind} cannot be evaluated here ({reason}): use a model whose "
            "cache can be forked"
        )

    @torch.no_grad()
    def _state_like(self) -> PyTree:
        """Return what `like` is, from the cache after a call."""
        if self.model.dtype == torch.float64:
            # The other implementations are not written for it.
            self.model.config._experts_implementation = "eager"
        tokens = torch.arange(8, device=self.model.device).view(2, 4) % self.vocab_size
        try:
            positions = torch.zeros(2, dtype=torch.long, device=tokens.device)
            _, (_, layers) = self.call(tokens, LMState(positions, ()), 1)
        except Exception as error:  # of `keep_cache`, or of a model that cannot be called so
            raise self.refusal(reason_of(error)) from error
        rows = [
            (leaf[0, ..., :0, :] if states.is_entries(name) else leaf[0]).to("meta")
            for name, leaf in states.leaves(layers)
        ]
        return states.unflatten(layers, rows)

    @property
    def like(self) -> PyTree:  # pyright: ignore
        """See `LanguageModel`; in the dtype of the weights, which `to` and others change."""
        if self._like[0] != self.model.dtype:
            with without_autocast(self.model.get_input_embeddings().weight):
                self._like = self.model.dtype, self._state_like()
        return self._like[1]

    @property
    def has_keys(self) -> bool:
        """Whether there are layers of attention, whose state grows."""
        return any(states.is_entries(name) for name, _ in states.leaves(self.like))

    @property
    def device(self) -> torch.device:  # pyright: ignore
        """See `LanguageModel`."""
        return self.model.device

    def beyond(self) -> Self:
        """Return the model without `max_length`; it shares its weights with this one.

        Raises:
            UserError: the model has no positions beyond `max_length`.
        """
        if self.max_length is not None and self.table is not None:
            raise UserError(
                f"this {self.kind} has {self.max_length:,} positions ({self.table}) and none "
                "beyond: give it shorter texts"
            )
        other = copy.copy(self)
        other.max_length = None
        return other

    def with_attention_window(self, window: int, sinks: int = 0) -> Self:
        """Return a model whose attention reads the first `sinks` and the last `window` tokens only.

        The current token counts. A layer with a smaller window keeps it. There is no `max_length`,
        because no distance of tokens is above that of window and sinks.

        Raises:
            UserError: a size that is not valid for this model, or a model whose attention cannot
                be limited; see `longrnn.hf.windowed`.
        """
        size = checked_window(self, window, sinks)
        whole = self.attending(AttentionWindow())
        reason = probe(whole)
        if reason is not None:
            raise no_window(self, reason)
        other = self.attending(size)
        other._like = whole._like  # found before the weights are sharded, where no call finds it
        return other

    def attending(self, window: AttentionWindow) -> Self:
        """Return a model with this window, unchecked, and without `max_length`."""
        other = copy.copy(self)
        other.max_length = None
        other.attention = WindowedAttention(self, window)
        other._like = None, ()
        return other

    @property
    def attention_window(self) -> AttentionWindow | None:
        """What attention reads; None for every token."""
        return None if self.attention is None else self.attention.window

    def call_length(self, batch_size: int) -> int:
        """Return how many tokens of each row go through the model in one call."""
        return max(16, CALL_TOKENS // batch_size)

    def own_windows(self) -> list[int | None]:
        """Return the window that the architecture gives each layer of a cache; None for none."""
        layers = DynamicCache(config=self.model.config).layers
        return [getattr(layer, "sliding_window", None) for layer in layers]

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
            UserError: unknown ids, a state of another model or batch size, too many tokens, or,
                without an `attention_window`, padded or packed rows.
        """
        starts_anew = rows is not None and rows.has_starts and self.start is not None
        reads_rows = self.attention is not None and self.attention.reads_rows
        if rows is not None and (starts_anew or not reads_rows):
            raise UserError(
                f"this {self.kind} is run through transformers, where padding and packed documents "
                "would enter its cache: give rows of one document and of one length"
            )
        tokens = check_tokens(tokens, self.vocab_size, rows)
        state = self.init_state(len(tokens)) if state is None else state
        states.check(state, self.like, len(tokens))
        time = tokens.shape[1]
        keep = time if keep is None else min(keep, time)
        if rows is not None:
            moved, first = rows.arrange(tokens), rows.first_kept(keep)
            part = rows.slice(0, moved.shape[1])
            logits, after = self.read(moved, state, moved.shape[1] - first, part)
            return LMOutput(rows.restore(logits, keep), after)
        positions = state.position
        refuse_long(self, int(positions.max()) + time)
        if reads_rows or bool((positions == positions[0]).all()):
            return self.read(tokens, state, keep)
        groups = [(positions == position).nonzero()[:, 0] for position in positions.unique()]
        outputs = [self.read(tokens[rows], states.take(state, rows), keep) for rows in groups]
        return states.take(states.join(outputs), torch.cat(groups).argsort())

    def read(self, tokens: Tensor, state: LMState, keep: int, rows: Rows | None = None) -> LMOutput:
        """Process rows in pieces; see `forward`."""
        kept, start, time = [], 0, tokens.shape[1]
        while start < time:
            width = self.call_length(len(tokens))
            if self.attention is not None and self.attention.counts_keys:
                width = max(1, self.attention.window.reach - int(state.position.max()))
            stop = min(time, start + width)
            part = None if rows is None else rows.slice(start, stop)
            wanted = max(0, stop - max(start, time - keep))
            logits, state = self.call(tokens[:, start:stop], state, max(1, wanted), part)
            if wanted:
                kept.append(logits[:, -wanted:])
            start = stop
        if not kept:
            weight = self.model.get_input_embeddings().weight
            kept = [weight.new_zeros(len(tokens), 0, self.vocab_size)]
        return LMOutput(torch.cat(kept, 1) if len(kept) > 1 else kept[0], state)

    def call(
        self, tokens: Tensor, state: LMState, keep: int, rows: Rows | None = None
    ) -> tuple[Tensor, LMState]:
        """Call the model once.

        Args:
            tokens: `(b, t)`, t >= 1.
            state: of rows that have read as many tokens, unless there is an `attention_window`.
            keep: at least 1; logits of at least the last `keep` tokens are returned.
            rows: where documents and padding begin; None for rows of one document.

        Raises:
            ValueError: the model returned no cache, or a cache of an unknown kind.
        """
        position, time = int(state.position.max()), tokens.shape[1]
        if self.attention is not None:
            call, cache = self.attention.call(state.position, time, rows), self.new_cache()
            if position:
                fill_cache(cache, state.layers, position, self.attention.windows)
            with call.reading():
                output = self.run(tokens, torch.zeros_like(tokens), cache, keep)
            layers = keep_cache(cache, call.calls, keys="unrotated")
            return output.logits, LMState(call.after, layers)
        cache = None
        if position:
            cache = DynamicCache(config=self.model.config)
            fill_cache(cache, state.layers, position)
        positions = state.position[:, None] + torch.arange(time, device=tokens.device)
        output = self.run(tokens, positions, cache, keep)
        layers = keep_cache(output.get(self._cache_name))
        return output.logits, LMState(state.position + time, layers)

    def run(self, tokens: Tensor, positions: Tensor, cache: Any, keep: int = 1) -> Any:
        """Return what the model returns for tokens and positions `(b, t)`; see `call`."""
        given = {str(self._cache_name): cache, "use_cache": True}
        if "logits_to_keep" in self._accepted:
            given["logits_to_keep"] = keep
        if "position_ids" in self._accepted:  # which some models count wrong themselves
            given["position_ids"] = positions
        return self.model(input_ids=tokens, return_dict=True, **given)

    def new_cache(self) -> UncutCache:
        """Return an empty cache for `run`."""
        return UncutCache(self.model.config)

    def weights_fingerprint(self, *, rounded: bool = False) -> str:
        """See `LanguageModel`."""
        config = self.model.config.to_dict()
        kept = {name: value for name, value in config.items() if name not in VOLATILE}
        weights = hash_weights(kept, self.model.state_dict(), rounded=rounded)
        if self.attention is None:
            return weights
        return hash_weights({"model": weights, "attention": self.attention.window}, {})
