"""Any causal language model of transformers as a `LanguageModel` with an explicit state.

Notable choices:
- A state holds the tensors of the model's cache, and every call makes a cache of its own from
  them, so that a state that was kept is never used up.
- Rows that have read different numbers of tokens go through the model one length at a time. No
  padding, mask or position is invented, so that this is exact for every architecture.
- A long text goes through in pieces. Whether a model computes in pieces and from a fork what it
  computes in one call is tried when it is wrapped. Some of transformers' recurrent models do so
  only row by row, or only token by token, and are then read like that; any other is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longrnn.errors import UserError
from longrnn.hf.cache import Carrier, DynamicCarrier, LayerCache, TensorCarrier
from longrnn.hf.positions import longest, scaling_by_length, table_of_positions
from longrnn.models.base import LMOutput, check_state, check_tokens, fingerprint
from longrnn.state import LMState, PyTree, histories, join, leaves, map_histories, take, tree_map

# Tokens (over all rows) of one piece.
SEGMENT_TOKENS = 1024
# Of the largest logit: what pieces may differ from one call.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
NARROW_TOLERANCE = 0.1
# Whether rows and whether tokens go through a model together, the fastest way first.
WAYS = ((True, True), (False, True), (True, False), (False, False))
# What a configuration says that changes nothing of what a model computes.
VOLATILE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


class HFLanguageModel(nn.Module):
    """A `LanguageModel`: a causal language model of transformers, for evaluation only.

    Gradients are not recorded.

    Args:
        model: any causal language model.
        beyond: whether it may read more tokens than it was made for.

    Attributes:
        max_length: the most tokens that one sequence may have; None for no limit.
        rows_together: whether the rows of a batch go through the model in one call.
        tokens_together: whether the tokens that follow a state do so.

    Raises:
        UserError: the model's cache is of a kind that cannot be forked, or does not carry all that
            the model needs to go on; or `beyond` for a model whose positions end.
    """

    model: Any  # what it has besides a forward depends on its architecture

    def __init__(self, model: PreTrainedModel, *, beyond: bool = False) -> None:
        super().__init__()
        self.model = model.eval()
        self.config: Any = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._forward = inspect.signature(model.forward).parameters
        scaling = scaling_by_length(self.config)
        if scaling is not None:
            raise self._refusal(
                f"its rotary positions are scaled by the length of the text, {scaling}, so that "
                "what was cached would change"
            )
        self._carrier = self._find_carrier()
        self.rows_together, self.tokens_together, self._like = self._probe()
        attends = any(isinstance(layer, LayerCache) and layer.keys for layer in self._like)
        self.max_length = longest(self.config) if attends else None
        self._table = table_of_positions(model)
        self._fingerprint: str | None = None
        if beyond:
            self.go_beyond()

    @property
    def kind(self) -> str:
        """The model's type, as transformers calls it."""
        return self.model.config.model_type

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding transposed."""
        head = self.model.get_output_embeddings()
        return head is not None and head.weight is self.model.get_input_embeddings().weight

    @property
    def can_go_beyond(self) -> bool:
        """Whether there are positions beyond `max_length`."""
        return self._table is None

    def init_state(self, batch_size: int) -> LMState:
        """The state before the first token, with histories of no entry."""
        device = self.model.device
        layers = tree_map(
            lambda leaf: torch.zeros(batch_size, *leaf.shape, dtype=leaf.dtype, device=device),
            self._like,
        )
        return LMState(torch.zeros(batch_size, dtype=torch.long, device=device), layers)

    def go_beyond(self) -> None:
        """Lifts `max_length`.

        Raises:
            UserError: the model has no positions beyond it.
        """
        if self.max_length is not None and not self.can_go_beyond:
            raise UserError(
                f"this {self.kind} has {self.max_length:,} positions ({self._table}) and none "
                "beyond: give it shorter texts"
            )
        self.max_length = None

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        """Consumes tokens; see `LanguageModel`.

        Raises:
            UserError: ids outside the vocabulary, a state of another model or batch size, or more
                tokens than `max_length`.
        """
        check_tokens(tokens, self.vocab_size)
        if state is None:
            state = self.init_state(len(tokens))
        check_state(state, self._like, len(tokens))
        time = tokens.shape[1]
        keep = time if keep is None else min(keep, time)
        if keep < 0:
            raise UserError(f"keep must be at least 0, not {keep}")
        if not tokens.numel():
            return LMOutput(self._no_logits(len(tokens)), state)
        positions = state.position.tolist()
        self.refuse_long(max(positions) + time)

        groups = [
            [row for row, position in enumerate(positions) if position == length]
            for length in sorted(set(positions))
        ]
        if not self.rows_together:
            groups = [[row] for row in range(len(positions))]
        if len(groups) == 1:
            return self._read(tokens, state, positions[0], keep)
        outputs = [
            self._read(tokens[rows], take(state, rows), positions[rows[0]], keep) for rows in groups
        ]
        order = torch.tensor([row for rows in groups for row in rows]).argsort()
        logits = torch.cat([output.logits for output in outputs])
        after = take(join([output.state for output in outputs]), order)
        return LMOutput(logits[order.to(logits.device)], after)

    def _read(self, tokens: Tensor, state: LMState, position: int, keep: int) -> LMOutput:
        """Rows that have all read `position` tokens, in pieces."""

        def last(entries: Tensor) -> Tensor:
            return entries[..., max(0, entries.shape[-2] - position) :, :]

        # Without what longer rows left in front.
        layers = map_histories(last, state.layers)
        kept = [] if keep else [self._no_logits(len(tokens))]
        start, time = 0, tokens.shape[1]
        while start < time:
            apart = not self.tokens_together and position + start > 0
            width = 1 if apart else max(16, SEGMENT_TOKENS // len(tokens))
            piece = tokens[:, start : start + width]
            cache = self._carrier.restore(layers, position + start) if position + start else None
            start += piece.shape[1]
            wanted = min(piece.shape[1], max(0, keep - (time - start)))
            logits, cache = self._call(piece, cache, max(1, wanted))
            layers = self._carrier.keep(cache)
            if wanted:
                kept.append(logits[:, -wanted:])
        logits = torch.cat(kept, 1) if len(kept) > 1 else kept[0]
        return LMOutput(logits, LMState(state.position + time, layers, state.extra))

    def _call(self, tokens: Tensor, cache: Any, keep: int) -> tuple[Tensor, Any]:
        """Logits of the last `keep` >= 1 tokens at least, and the cache after all of them."""
        arguments: dict[str, Any] = {self._carrier.name: cache, "use_cache": True}
        if "logits_to_keep" in self._forward:
            arguments["logits_to_keep"] = keep
        output = self.model(input_ids=tokens, return_dict=True, **arguments)
        if output.get(self._carrier.name) is None:
            raise UserError("it gives no cache back")
        return output.logits, output[self._carrier.name]

    def _no_logits(self, batch_size: int) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        return torch.zeros(batch_size, 0, self.vocab_size, dtype=weight.dtype, device=weight.device)

    def _find_carrier(self) -> Carrier:
        for name in ("past_key_values", "cache_params"):
            if name in self._forward:
                return DynamicCarrier(name, self.model.config)
        if "state" in self._forward:
            return TensorCarrier("state")
        raise self._refusal("it takes no cache")

    @torch.no_grad()
    def _probe(self) -> tuple[bool, bool, PyTree]:
        """How the model is to be read: rows together, tokens together, and the layers of one row
        without its batch axis, on the meta device.

        Raises:
            UserError: in no way do pieces, or what follows a fork, give what one call gives.
        """
        tokens = torch.arange(1, 25, device=self.model.device).view(2, 12) % self.vocab_size
        try:
            layers = self._carrier.keep(self._call(tokens[:, :6], None, 1)[1])
            for name, leaf in leaves(layers):
                if leaf.shape[:1] != (2,):
                    raise UserError(f"its cache has no batch axis first ({name})")
        except UserError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:  # whatever a model that is not made for it raises
            raise self._refusal(_line(error)) from error
        rows = tree_map(lambda leaf: leaf[0].to("meta"), layers)
        self._like = map_histories(lambda entries: entries[..., :0, :], rows)
        # Keys and values are only ever appended, and a narrow dtype shows whether they are. What a
        # recurrent layer loses may be less than its rounding.
        appended = histories(layers) == {name for name, _ in leaves(layers)}
        with nullcontext() if appended else _in_float32(self.model):
            return *self._way(tokens), self._like

    def _way(self, tokens: Tensor) -> tuple[bool, bool]:
        """The fastest of `WAYS` in which pieces give what one call gives."""
        whole, reason = self._call(tokens, None, tokens.shape[1])[0], ""
        for self.rows_together, self.tokens_together in WAYS:
            try:
                off = max(self._error(tokens, whole, sizes) for sizes in ((6, 4, 2), (7, 1, 1, 3)))
            except Exception as error:  # likewise
                reason = reason or _line(error)
                continue
            if off <= TOLERANCE.get(whole.dtype, NARROW_TOLERANCE):
                return self.rows_together, self.tokens_together
            reason = reason or f"read in pieces it says something else, {off:.1e} off"
        raise self._refusal(reason)

    def _error(self, tokens: Tensor, whole: Tensor, sizes: tuple[int, ...]) -> float:
        """How far the logits of pieces are from `whole`, relative to its largest entry."""
        state, rows = self.init_state(len(tokens)), []
        for piece in tokens.split(list(sizes), dim=1):
            position = int(state.position[0])
            outputs = [
                self._read(piece[group], take(state, group), position, piece.shape[1])
                for group in ([[0, 1]] if self.rows_together else [[0], [1]])
            ]
            rows.append(torch.cat([output.logits for output in outputs]))
            state = join([output.state for output in outputs])
            # Another text in between: what a model keeps elsewhere would be of that one.
            self._call(tokens.flip(0, 1)[:, :4], None, 1)
        return float((torch.cat(rows, 1) - whole).abs().max() / whole.abs().max())

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"a {self.kind} of transformers cannot be evaluated here ({reason}): "
            "take a model whose cache can be forked"
        )

    def refuse_long(self, length: int) -> None:
        """Raises a `UserError` where one sequence of so many tokens is beyond `max_length`."""
        if self.max_length is not None and length > self.max_length:
            more = (
                ", or lift this with beyond=True (CHECKPOINT+beyond)" if self.can_go_beyond else ""
            )
            raise UserError(
                f"this {self.kind} was made for at most {self.max_length:,} tokens and would have "
                f"read {length:,}: give it shorter texts{more}"
            )

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the SHA-256 of configuration and weights."""
        if self._fingerprint is None:
            config = self.model.config.to_dict()
            kept = {name: value for name, value in config.items() if name not in VOLATILE}
            self._fingerprint = fingerprint(kept, self.model.state_dict())
        return self._fingerprint


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """With narrower weights widened, which loses nothing, and narrowed again at the end."""
    tensors = [*model.parameters(), *model.buffers()]
    narrow = [(t, t.dtype) for t in tensors if t.is_floating_point() and t.itemsize < 4]
    for tensor, _ in narrow:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in narrow:
            tensor.data = tensor.data.to(dtype)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
