"""The interface of a language model with an explicit state."""

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells import Cell, Edit
from longrnn.errors import UserError
from longrnn.imports import hash_of_users
from longrnn.mitigations import Chain, bind
from longrnn.mitigations.spec import MitigationSpec
from longrnn.mitigations.spec import mitigation as build_mitigation
from longrnn.ops.rows import Rows
from longrnn.ops.transforms import is_transformed
from longrnn.state import LMState, PyTree, described, leaves, start_of, tree_map, with_recurrent

# Logits, over all rows and tokens, that one call of `token_losses` may hold.
MAX_LOGITS = 2**25


class LMOutput(NamedTuple):
    """`logits`: `(b, t, v)`, or the last `keep` tokens only; `state`: after the last token."""

    logits: Tensor
    state: LMState


class LanguageModel(nn.Module, ABC):
    """Maps tokens and a state to logits and a state, and never changes the given state.

    Attributes:
        vocab_size: number of token ids.
        like: the state's layers for one row without its batch axis, on the meta device.
        device: of the state.
        max_length: how many tokens a sequence may have; None for any number.
        edits: the changes of the recurrence of each cell, None for no change; see `under`.
        mitigation: what they come from; None without.
        mitigated_heads: per part of the mitigation and layer, the changed heads, `(h,)` bool.
        start: the state of one row with which every document begins; None for zeros.
        learned: what is trained of it: the leaves of `state.recurrent`, without batch axis. Only a
            model in training that learns its initial state has it.
    """

    vocab_size: int
    like: PyTree
    device: torch.device
    max_length: int | None = None
    mitigation: Chain | None = None
    mitigated_heads: Sequence[Sequence[Tensor]] = ()
    start: LMState | None = None
    learned: nn.ParameterList
    _edits: Sequence[Edit | None] | None = None

    @property
    def cells(self) -> list[Cell]:
        """The recurrent cells of longrnn in this model, first layer first; empty for others."""
        return []

    @property
    def edits(self) -> Sequence[Edit | None]:
        """One per cell."""
        return [None] * len(self.cells) if self._edits is None else self._edits

    def zero_state(self, batch_size: int) -> LMState:
        """The state of `batch_size` rows that have read nothing."""
        zeros = partial(torch.zeros, device=self.device)
        layers = tree_map(lambda x: zeros(batch_size, *x.shape, dtype=x.dtype), self.like)
        return LMState(zeros(batch_size, dtype=torch.long), layers)

    def init_state(self, batch_size: int) -> LMState:
        """The state before the first token of `batch_size` rows: zeros, or see `starting_from`."""
        zero, start = self.zero_state(batch_size), self.start
        if start is None:
            return zero
        if "learned" in self._modules:
            start = start._replace(
                layers=with_recurrent(start.layers, [x[None] for x in self.learned])
            )
        return tree_map(lambda x, like: x.to(like).repeat_interleave(batch_size, 0), start, zero)

    def starting_from(self, state: LMState | None) -> Self:
        """The model whose documents begin with a state: a copy that shares all weights.

        Args:
            state: of one row, such as that after a prompt, or of a file that `load_start` reads;
                None for zeros.

        Raises:
            UserError: the state does not fit the model.
        """
        copied = copy.copy(self)
        copied.start = state and start_of(dict(leaves(state)), copied, "the initial state")
        return copied

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        keep: int | None = None,
        rows: Rows | None = None,
    ) -> LMOutput:
        """Consumes tokens.

        Args:
            tokens: `(b, t)` integers, b >= 1; t = 0 is allowed and changes nothing.
            state: of the same batch; None for `init_state`.
            keep: return logits for the last `keep` tokens only (0 is allowed); None for all.
            rows: where documents and padding begin; None for rows of one document without padding.

        Raises:
            UserError: ids outside the vocabulary, the state of another model, or rows that this
                model cannot read.
        """

    @abstractmethod
    def weights_fingerprint(self, *, rounded: bool = False) -> str:
        """`fingerprint` without mitigation and initial state: a hash of configuration and weights.

        Args:
            rounded: whether weights are rounded to bfloat16, so that dtypes do not matter.
        """

    def cell_states(self, state: LMState) -> list[PyTree]:
        """The state of each cell."""
        return list(state.layers)

    def memories(self, state: LMState) -> list[Tensor]:
        """The recurrent state of each cell by head, `(b, h, p, n)`; n is 1 in a stepwise cell."""
        triples = zip(self.cells, self.cell_states(state), self.edits, strict=True)
        return [cell.memory(state, edit) for cell, state, edit in triples]

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, state: LMState | None = None
    ) -> tuple[Tensor, LMState]:
        """The loss of each token, without gradients and without a tensor of all logits.

        Args:
            tokens: `(b, t)` integers.
            targets: `(b, t)` int64, the token after each; the loss is 0 where they are negative.
            state: of the same batch; None for `init_state`.

        Returns:
            Losses in nats, `(b, t)` float32 or wider, and the state after the last token.
        """
        tokens = check_tokens(tokens, self.vocab_size)
        after = self.init_state(len(tokens)) if state is None else state
        width = max(1, MAX_LOGITS // (len(tokens) * self.vocab_size))
        losses = []
        for piece, target in zip(tokens.split(width, 1), targets.split(width, 1), strict=True):
            logits, after = self(piece, after)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
            loss = F.cross_entropy(wide, target.clamp(min=0), reduction="none")
            losses.append(loss.masked_fill(target < 0, 0))
        return torch.cat(losses, 1), after

    def under(self, mitigation: MitigationSpec | None) -> Self:
        """The model under a mitigation: a shallow copy that shares all weights with this model.

        Args:
            mitigation: as `longrnn.mitigation` takes it, added to what the model has, such as
                `"sliding_window(window=8192)"`; None for the plain model.

        Raises:
            UserError: a model without cells of longrnn, a mitigation that is not valid for them,
                layers or heads that do not exist, numbers calibrated for another model, or members
                that exclude each other.
        """
        copied = copy.copy(self)
        if mitigation is None:
            vars(copied).update(_edits=None, mitigation=None, mitigated_heads=())
            return copied.starting_from(self.start)
        require_cells(self)
        whole = build_mitigation([self.mitigation or (), mitigation])
        # The plain model is what numbers are calibrated for.
        with torch.inference_mode(False):  # so that the edits serve training too
            bound = bind(whole, self.cells, self.weights_fingerprint)
        vars(copied).update(
            _edits=bound.edits,
            mitigation=bound.mitigation if whole.parts else None,
            mitigated_heads=bound.heads,
        )
        return copied.starting_from(self.start)

    def fingerprint(self) -> str:
        """A short hash of all that a model computes with, also of the files of classes of users.

        Equal hashes mean equal models: configuration, weights, mitigation and initial state.
        """
        if self.start is not None:
            plain = self.starting_from(None).fingerprint()
            return hash_weights({"model": plain}, dict(leaves(self.start)))
        weights = self.weights_fingerprint()
        if self.mitigation is None:
            return weights
        mitigations = self.mitigation.parts
        users = hash_of_users(map(type, mitigations))
        # A file is identified by its hash, wherever it is.
        parts = [part.model_copy(update=dict.fromkeys(part.files)) for part in mitigations]
        whole = f"{weights}/{'+'.join(map(str, parts))}{users}"
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


def require_cells(model: LanguageModel, name: str = "this model") -> None:
    """Refuse a model without cells of longrnn.

    Args:
        model: any language model.
        name: what an error calls it.

    Raises:
        UserError: it has none.
    """
    if not model.cells:
        raise UserError(
            f"{name} cannot be used here, because longrnn computes no recurrence of it: give a "
            "checkpoint of longrnn, or a hybrid with recurrent layers; CHECKPOINT+beyond and "
            "--chunk-select work for any model"
        )


def hash_weights(
    config: Mapping[str, Any], weights: Mapping[str, Any], *, rounded: bool = False
) -> str:
    """16 hexadecimal digits of the SHA-256 of a configuration and of weights."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        weight = weight.bfloat16() if rounded and weight.is_floating_point() else weight
        raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name}{weight.dtype}{tuple(weight.shape)}".encode())
        digest.update(raw.numpy())
    return digest.hexdigest()[:16]


def check_tokens(tokens: Tensor, vocab_size: int, rows: Rows | None = None) -> Tensor:
    """Returns token ids as int64, from any integer dtype.

    Args:
        tokens: `(b, t)` integers.
        vocab_size: number of token ids.
        rows: where padding stands, at which any id is allowed and 0 is returned.

    Raises:
        UserError: not integers of shape `(b, t)` with b >= 1, ids outside the vocabulary, or rows
            of another shape.
    """
    is_integer = isinstance(tokens, Tensor) and not (
        tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    )
    if not is_integer or tokens.ndim != 2 or not len(tokens):
        raise UserError(
            f"tokens must be integers of shape (batch, time) with a batch of at least 1, not "
            f"{described(tokens)}: give torch.tensor(ids), one row per sequence"
        )
    tokens = tokens.long()
    if rows is not None:
        if rows.shape != tuple(tokens.shape):
            raise UserError(
                f"the rows describe {rows.shape} tokens and {tuple(tokens.shape)} were given: "
                "make Rows from masks of the shape of the tokens"
            )
        tokens = rows.zero_padding(tokens)
    # Reading the ids from another device would wait for it at every token.
    if tokens.numel() and tokens.device.type == "cpu" and not is_transformed():
        low, high = map(int, tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}: "
                "use the tokenizer that this model was trained with"
            )
    return tokens


def out_of_reach(model: LanguageModel, tokens: int) -> str | None:
    """Why a model cannot read a sequence of that many tokens; None if it can."""
    if model.max_length is None or tokens <= model.max_length:
        return None
    return (
        f"the model was made for at most {model.max_length:,} tokens and would have read "
        f"{tokens:,}: give shorter texts (`longrnn info` says whether CHECKPOINT+beyond lifts the "
        "limit)"
    )


def refuse_long(model: LanguageModel, tokens: int) -> None:
    """Raises a UserError for more tokens than a model can read."""
    reason = out_of_reach(model, tokens)
    if reason is not None:
        raise UserError(reason)
