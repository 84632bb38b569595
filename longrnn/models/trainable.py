"""The interface of a language model that can be trained.

Notable choices:
- A long input goes through all layers in segments, which give the same result as one call because
  the state is exact. Without gradients, memory is bounded by the segment and not by the length.
- Logits are computed for the kept tokens only.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel, LMOutput, check_tokens
from longrnn.ops.hooks import own_weight
from longrnn.ops.rows import Rows, run_documents
from longrnn.state import NO_FINGERPRINTS, LMState, check

OFFLOADED = (
    "weights of this model are offloaded to the disk or the CPU, where its recurrence cannot read "
    "them: load it without device_map, max_memory and cpu_offload"
)
# The file of an initial state records this where it fits the weights in its folder alone.
OF_CHECKPOINT = dict.fromkeys(NO_FINGERPRINTS, "that of the checkpoint beside it")


def _refuse_quantization(model: Any, value: Any) -> None:
    raise UserError(
        "torch.ao.quantization cannot quantize this model, because its cells read the weights of "
        "linear layers without calling them: load it with narrower weights, as CHECKPOINT+bfloat16"
    )


class TrainableLM(LanguageModel):
    """A language model that `longrnn train` trains.

    Attributes:
        head: the module of the last product, which has a `weight` `(v, d)`.
        blocks: the layers from residual stream to residual stream, the first one first.
        soft_cap: the logits are soft_cap · tanh(product / soft_cap); None for the products.
        has_unused_weights: whether a call may leave weights without a gradient.
        is_sharded: whether processes share the weights, and must call blocks equally often (FSDP2).
        trained_under: the spec of the mitigation under which the model was trained; None without.
        base_name: of the checkpoint that adapters or a learned initial state were added to.
        base_fingerprint: of its weights; empty where the weights themselves are trained.
        start_fingerprints: what the file of the initial state records of its model.
        base_layout: the layout of that checkpoint; None for a Hugging Face model's own.
    """

    head: Any
    blocks: Any
    soft_cap: float | None = None
    has_unused_weights: bool = False
    is_sharded: bool = False
    trained_under: str | None = None
    base_name: str = ""
    base_fingerprint: str = ""
    start_fingerprints: Mapping[str, str] = OF_CHECKPOINT
    base_layout: str | None = None
    # torch.ao.quantization sets it in every model that it is given.
    qconfig = property(lambda model: None, _refuse_quantization)

    @property
    def has_positions(self) -> bool:
        """Whether results depend on the positions of tokens."""
        return True

    @property
    def spec(self) -> str | None:
        """The mitigation as `CHECKPOINT+…` takes it; None without."""
        return None if self.mitigation is None else str(self.mitigation)

    @abstractmethod
    def segment_width(self, batch_size: int, time: int) -> int:
        """How many of `time` tokens of each row go through all layers together."""

    @abstractmethod
    def segment(
        self, tokens: Tensor, state: LMState, rows: Rows | None, observe: list[Tensor] | None
    ) -> tuple[Tensor, LMState]:
        """The output of the last block, `(b, t, d)`, and the state, for one segment.

        Args:
            tokens: `(b, t)` int64, or embeddings `(b, t, d)`.
            state: before the first of them.
            rows: of these tokens.
            observe: is extended by the vectors before each block.
        """

    def head_input(self, vectors: Tensor, observe: list[Tensor] | None) -> Tensor:
        """The head's input from what `segment` returns; `observe` is extended by it."""
        return vectors

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
        """`forward` without the head: returns the head's input, `(b, t, d)`, and the state.

        For losses that do not hold all logits at once (`longrnn.ops.loss`).

        Args:
            tokens: `(b, t)` integers, or embeddings `(b, t, d)` in their place.
            state: see `forward`.
            keep: see `forward`.
            rows: see `forward`.
            observe: an empty list, which is filled with the vectors before and after each block of
                the last `keep` tokens, `(b, t, d)`; the last entry is the head's input.

        Raises:
            UserError: as `forward`, or weights that accelerate has offloaded.
        """
        if self.head.weight.is_meta and not tokens.is_meta:
            raise UserError(OFFLOADED)
        embedded = isinstance(tokens, Tensor) and tokens.is_floating_point() and tokens.ndim == 3
        if not embedded:
            tokens = check_tokens(tokens, self.vocab_size, rows)
        if state is not None:
            check(state, self.like, len(tokens))
        after = self.init_state(len(tokens)) if state is None else state
        time = tokens.shape[1]
        keep = time if keep is None else min(keep, time)
        source = tokens if rows is None else rows.arrange(tokens)
        first = time - keep if rows is None else rows.first_kept(keep)
        part_of = None if rows is None else rows.slice(0, source.shape[1])
        width, kept = self.segment_width(len(tokens), source.shape[1]), []
        # All tokens in one segment. The rows of another process may be shorter or longer.
        if observe is not None or self.is_sharded:
            width = max(1, source.shape[1])
        for start in range(0, source.shape[1], width):
            part = source[:, start : start + width]
            part_rows = None if part_of is None else part_of.slice(start, start + width)
            vectors, after = self._documents(part, after, part_rows, observe)
            if start + width > first:  # even an empty view would hold the segment's memory
                kept.append(vectors[:, max(0, first - start) :])
        if not kept:
            weight = own_weight(self.head)
            return weight.new_zeros(len(tokens), keep, weight.shape[1]), after
        if observe is not None and first:
            # Not where all are kept: what is returned then has a gradient itself.
            observe[:] = [vectors[:, first:] for vectors in observe]
        hidden = self.head_input(torch.cat(kept, dim=1) if len(kept) > 1 else kept[0], observe)
        if rows is None:
            return hidden, after
        if observe is not None:
            observe[:] = [rows.restore(vectors, keep) for vectors in observe]
        return rows.restore(hidden, keep), after

    def _documents(
        self, tokens: Tensor, state: LMState, rows: Rows | None, observe: list[Tensor] | None
    ) -> tuple[Tensor, LMState]:
        """`segment`, in which documents begin with the initial state, whatever that is."""
        if rows is None or not rows.has_starts or self.start is None:
            return self.segment(tokens, state, rows, observe)
        seen: list[list[Tensor]] = []

        def run(part: Tensor, before: LMState) -> tuple[Tensor, LMState]:
            seen.append([])
            return self.segment(part, before, None, None if observe is None else seen[-1])

        initial = self.init_state(len(tokens))
        vectors, state = run_documents(run, tokens, state, initial, rows)
        if observe is not None:
            observe += [torch.cat(layer, 1) for layer in zip(*seen, strict=True)]
        return vectors, state

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `(b, t, v)` of what `hidden` returns."""
        logits = self.head(hidden)  # the module, which may have an adapter
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def logit_factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """X and W of the logits X Wᵀ, for losses that do not hold all logits at once.

        Args:
            hidden: the head's input, `(…, d)`.

        Returns:
            `(…, d)` and `(v, d)`. Where the head has a bias, X has a further column of ones and W
            that of the bias.
        """
        weight, bias = own_weight(self.head), getattr(self.head, "bias", None)
        if bias is None:
            return hidden, weight
        ones = hidden.new_ones(*hidden.shape[:-1], 1)
        return torch.cat([hidden, ones], dim=-1), torch.cat([weight, bias[:, None]], dim=1)

    def in_float64(self) -> Self:
        """A copy with weights and states in float64."""
        return copy.deepcopy(self).double()

    @abstractmethod
    def gradient_checkpointing_enable(self, enabled: bool = True) -> None:
        """Keeps the input of each block alone, which the backward pass computes again."""
