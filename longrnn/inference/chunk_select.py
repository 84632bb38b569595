"""Selects the chunk of a long context after which the model's answer has the lowest entropy.

This is not one of `longrnn.mitigations`, because it changes no recurrence: it shortens the prompt
of any language model.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.inference.trie import read_texts
from longrnn.models import LanguageModel
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress


class ChosenChunk(NamedTuple):
    """The selected chunk.

    Attributes:
        chunk: its index, from 0.
        entropies: `(m,)`, in nats, entropy of the first token after the query for each chunk.
        prompt: `(t,)`, the prefix, the chunk and the query.
    """

    chunk: int
    entropies: Tensor
    prompt: Tensor


@torch.no_grad()
def select(
    model: LanguageModel,
    context: Tensor,
    query: Tensor,
    *,
    chunk: int,
    prefix: Tensor,
    batch_size: int = 16,
) -> ChosenChunk:
    """Selects the chunk of a context with the lowest entropy of the answer (arXiv 2505.07793).

    Each chunk is read after the prefix and before the query, and the entropy is that of the first
    token after the query. What chunks share, such as a long prefix, is read once and its state is
    forked, so no state sees more than prefix, one chunk and query. Text that crosses a chunk border
    is split.

    Args:
        model: any language model.
        context: `(t,)` token ids, t >= 1.
        query: `(t,)` token ids, t >= 1, of its own length.
        chunk: tokens per chunk; the last chunk may be shorter.
        prefix: `(t,)` token ids that precede every chunk; t = 0 is allowed.
        batch_size: how many chunks are read at once.
    """
    chunks = [torch.cat([prefix, part]) for part in context.split(chunk)]
    silent = Progress("", 0, unit="tokens", quiet=True)
    entropies = torch.empty(len(chunks), dtype=torch.float64)
    for numbers, _, read in read_texts(model, chunks, batch_size, silent, keep=0):
        queries = query.to(read.position.device).expand(len(numbers), -1)
        logits = model(queries, read, keep=1).logits[:, -1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        of_batch = torch.special.entr(wide.softmax(-1)).sum(-1)
        refuse_nonfinite(of_batch, model, queries, read)
        entropies[numbers] = of_batch.double().cpu()
    values = entropies.tolist()
    best = values.index(min(values))  # of equal entropies, that of the first chunk
    return ChosenChunk(best, entropies, torch.cat([chunks[best], query]))
