"""Checks that a Hugging Face model gives the same logits in pieces and in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.models.finite import cause_of_nonfinite
from longrnn.state import LMState, leaves, map_histories, tree_map

if TYPE_CHECKING:
    from longrnn.hf.foreign import ForeignLM

# How much the logits of pieces may differ from those of one call, relative to the largest logit: if
# all weights are float32 or wider, and if not.
TOLERANCE, NARROW_TOLERANCE = 1e-4, 0.1
# Lengths of the pieces into which the twelve tokens are cut.
SPLITS = ((6, 4, 2), (7, 1, 1, 3))


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
        pieces = [_in_pieces(model, tokens, sizes) for sizes in SPLITS]
    except Exception as error:  # of `close_cache`, or of a model that does not support the call
        return one_line(error)
    if not whole.isfinite().all():
        raise UserError(
            f"this {model.kind} gives logits that are not finite in {whole.dtype}: "
            f"{cause_of_nonfinite(model)}"
        )
    off = max(float((one - whole).abs().max() / whole.abs().max()) for one in pieces)
    is_narrow = any(weight.dtype.itemsize < 4 for weight in model.parameters())
    if off <= (NARROW_TOLERANCE if is_narrow else TOLERANCE):
        return None
    return f"in pieces its logits differ by {off:.1e} of the largest"


def _in_pieces(model: ForeignLM, tokens: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Returns the logits of all tokens, read in pieces of these sizes."""
    state: LMState = model.init_state(len(tokens))
    found = []
    for piece in tokens.split(list(sizes), dim=1):
        logits, state = model.read(piece, state, int(state.position[0]), piece.shape[1])
        found.append(logits)
        # Reads another text in between, which would overwrite any state outside of the cache.
        model.call(tokens.flip(0, 1)[:, :4], (), 0, 1)
    return torch.cat(found, 1)
