"""Reading only the chunk of a long context after which the model's answer has the lowest entropy.

This changes no recurrence, so it is not a mitigation of `longrnn.mitigations`: it chooses among the
states of any language model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel
from longrnn.models.finite import explain_nonfinite
from longrnn.state import LMState, expand, take


class Choice(NamedTuple):
    """The chunk that was chosen.

    Attributes:
        chunk: which one, from 0.
        entropies: `(chunks,)`, of the first token after the query, in nats, for each chunk.
        state: after prefix and chunk, one row, before the query.
    """

    chunk: int
    entropies: Tensor
    state: LMState


@torch.no_grad()
def select(
    model: LanguageModel,
    context: Tensor,
    query: Tensor,
    *,
    chunk: int,
    prefix: Tensor | None = None,
    batch_size: int = 16,
) -> Choice:
    """Reads prefix, chunk and query for each chunk of a context, and chooses one.

    The chosen one has the lowest entropy of the first token after the query (arXiv 2505.07793).
    The prefix is read once and its state forked, so any model with an explicit state will do; no
    state sees more than prefix, chunk and query. What lies across the border of two chunks is
    seen by neither.

    Args:
        model: any language model.
        context: `(t,)` tokens, t >= 1.
        query: `(q,)` tokens, q >= 1.
        chunk: tokens of a chunk; the last one may be shorter.
        prefix: `(k,)` tokens that come before every chunk.
        batch_size: chunks that are read together.

    Raises:
        UserError: an empty context or query, a chunk or a batch size below 1.
    """
    if chunk < 1 or batch_size < 1 or len(context) == 0 or len(query) == 0:
        raise UserError(
            "chunk_select needs a chunk and a batch size of at least 1, a context and a query"
        )
    state = model.init_state(1)
    device = state.position.device
    if prefix is not None and len(prefix):
        state = model(prefix[None].to(device), state, keep=0).state
    pieces = context.to(device).split(chunk)
    entropies: list[Tensor] = []
    best: tuple[float, int, LMState] | None = None
    for start in range(0, len(pieces), batch_size):
        # The last chunk may be shorter, and rows of one batch have one length.
        group = pieces[start : start + batch_size]
        whole = [piece for piece in group if len(piece) == len(group[0])]
        for rows in (whole, list(group[len(whole) :])):
            if not rows:
                continue
            read = model(torch.stack(rows), expand(state, len(rows)), keep=0).state
            asked = query.to(device).expand(len(rows), -1)
            logits = model(asked, read, keep=1).logits[:, -1]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            found = torch.special.entr(wide.softmax(-1)).sum(-1)
            if not bool(found.isfinite().all()):
                before = context[:0] if prefix is None else prefix
                seen = [before.to(device).expand(len(rows), -1), torch.stack(rows), asked]
                explain_nonfinite(model, torch.cat(seen, dim=1))
            least = int(found.argmin())
            if best is None or float(found[least]) < best[0]:
                index = sum(map(len, entropies)) + least
                best = float(found[least]), index, take(read, [least])
            entropies.append(found.cpu())
    assert best is not None
    return Choice(best[1], torch.cat(entropies), best[2])
