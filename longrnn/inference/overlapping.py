"""Losses per token in overlapping windows: the usual protocol for models without a carried state.

A text is read in windows of `context` tokens, each `stride` tokens after the previous one and each
from the initial state. The first window scores all of its tokens and every later window its last
`stride`, so that each token is scored once, with at least `context - stride` tokens before it. The
last window is shorter where the text ends inside it. This is the protocol of the guide "Perplexity
of fixed-length models" of Hugging Face transformers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longrnn.inference.engine import token_losses
from longrnn.inference.trie import prefill
from longrnn.models import LanguageModel
from longrnn.progress import Progress


@torch.no_grad()
def overlapping_losses(
    model: LanguageModel,
    tokens: Tensor,
    progress: Progress,
    *,
    context: int,
    stride: int,
    rows: int = 1,
    bos_id: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Computes the loss of every token after the first in overlapping windows, in parts.

    Args:
        model: reads every window from the initial state.
        tokens: `(b, t + 1)` token ids; the last is only predicted.
        progress: counts the scored tokens as steps, and the tokens that are read as units.
        context: tokens that a window reads.
        stride: tokens between the starts of two windows, from 1 to the context.
        rows: windows in one batch, of all texts together; at least one window of each text.
        bos_id: is read in place of the first token of every window.

    Yields:
        The position where a part begins, and its losses in nats, `(b, t)` float64 on the CPU: the
        loss at position i is that of token i + 1.

    Raises:
        UserError: logits are not finite.
    """
    texts, length = len(tokens), tokens.shape[1] - 1
    # Windows after the first that end inside the text, and the tokens that a last one scores.
    whole = max(0, (length - context) // stride)
    rest, together = length - context - whole * stride, max(1, rows // texts)
    groups = [(0, 1, min(context, length))]
    groups += [(n, min(together, whole + 1 - n), stride) for n in range(1, whole + 1, together)]
    groups += [(whole + 1, 1, rest)] if rest > 0 else []
    for number, count, scored in groups:
        begin = number * stride
        size = min(context, length - begin)
        part = tokens[:, begin : begin + (count - 1) * stride + size + 1]
        windows, before = part.unfold(1, size + 1, stride).flatten(0, 1), size - scored
        if bos_id is not None:
            windows = windows.index_fill(1, torch.tensor(0, device=windows.device), bos_id)
        initial = model.init_state(len(windows))
        _, state = prefill(model, windows[:, :before], initial, progress, keep=0)
        for start, nats in token_losses(model, windows[:, before:], state):
            progress.advance(nats.numel(), nats.numel())
            by_text = nats.view(texts, count, -1)
            for which in range(count):
                yield begin + before + which * stride + start, by_text[:, which]
