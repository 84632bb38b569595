"""Checks that a Hugging Face model gives the same logits in pieces and in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from longrnn.files import one_line
from longrnn.models.finite import refuse_nonfinite
from longrnn.state import leaves, map_histories, tree_map

if TYPE_CHECKING:
    from longrnn.hf.foreign import ForeignLM

# Lengths of the pieces into which the twelve tokens are cut.
SPLIT = (7, 1, 1, 3)


@torch.no_grad()
def probe(model: ForeignLM) -> str | None:
    """Sets `model.like` and compares the logits of pieces with those of one call without a cache.

    Returns:
        The reason why the model cannot be called in pieces; None if it can.

    Raises:
        UserError: the logits are not finite.
    """
    tokens = torch.arange(1, 25, device=model.model.device).view(2, 12) % model.vocab_size
    try:
        _, layers = model.call(tokens[:, :6], (), 0, 1)
        for name, leaf in leaves(layers):
            if leaf.shape[:1] != (2,):
                return f"its cache has no batch axis first ({name})"
        rows = tree_map(lambda leaf: leaf[0].to("meta"), layers)
        model.like = map_histories(lambda entries: entries[..., :0, :], rows)
        whole = model.model(input_ids=tokens, use_cache=False).logits
        state, found = model.init_state(len(tokens)), []
        for piece in tokens.split(SPLIT, dim=1):
            logits, state = model.read(piece, state, int(state.position[0]), piece.shape[1])
            found.append(logits)
            # Reads another text in between, which would overwrite any state outside of the cache.
            model.call(tokens.flip(0, 1)[:, :4], (), 0, 1)
    except Exception as error:  # of `close_cache`, or of a model that does not support the call
        return one_line(error)
    refuse_nonfinite(whole, model, tokens)
    off = float((torch.cat(found, 1) - whole).abs().max() / whole.abs().max())
    is_narrow = any(weight.dtype.itemsize < 4 for weight in model.parameters())
    return (
        f"in pieces its logits differ by {off:.1e}" if off > (0.1 if is_narrow else 1e-4) else None
    )
