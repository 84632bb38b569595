"""Checks that a Hugging Face model gives the same logits in pieces and in one call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longrnn.models.finite import refuse_nonfinite
from longrnn.programs import reason_of

PROBED_ROWS, TIME = 2, 12
# Lengths of the pieces into which each row is cut.
SPLIT = (7, 1, 1, 3)


class FirstExperts(TorchFunctionMode):
    """Makes every token go to the first experts, whatever their scores are.

    Rounding differs between pieces and one call, and where two experts have nearly equal scores it
    would decide which of them computes a token. Routers choose by `topk` over their last dimension.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[:-1] != result.indices.shape[:-1]:
            return result
        first = torch.arange(result.indices.shape[-1], device=scores.device)
        indices = first.expand_as(result.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))  # pyright: ignore


@torch.no_grad()
def probe(model: Any) -> str | None:
    """Compares the logits of pieces with those of one call without a cache.

    Args:
        model: a `ForeignLM`.

    Returns:
        The reason why the model cannot be called in pieces; None if it can.

    Raises:
        UserError: the logits are not finite.
    """
    tokens = torch.arange(1, 1 + PROBED_ROWS * TIME, device=model.model.device).view(
        PROBED_ROWS, TIME
    )
    tokens = tokens % model.vocab_size
    try:
        with FirstExperts():
            whole = model.model(input_ids=tokens, use_cache=False).logits
            state, pieces = model.init_state(PROBED_ROWS), []
            for piece in tokens.split(SPLIT, dim=1):
                logits, state = model(piece, state)
                pieces.append(logits)
                # Reads another text, which would overwrite any state outside of the cache.
                model(tokens.flip(0, 1)[:, :4], keep=1)
    except Exception as error:  # of `keep_cache`, or of a model that does not support the call
        return reason_of(error)
    refuse_nonfinite(whole, model, tokens)
    found, is_narrow = torch.cat(pieces, 1), any(w.dtype.itemsize < 4 for w in model.parameters())
    # Rounding alone gives 1e-4 in float32 with the weights of a trained model of 30 layers.
    limit = 0.1 if is_narrow else 1e-3
    difference = _difference(found, whole)
    if difference <= limit:
        return None
    reason = f"in pieces its logits differ by {difference:.1e}"
    if not is_narrow:
        return reason
    # Rounding may be the cause, which a call in float32 shows. It differs by chance.
    with FirstExperts():
        exact = copy.deepcopy(model.model).float()(input_ids=tokens, use_cache=False).logits
    error, of_whole = _difference(found, exact), _difference(whole, exact)
    if error <= max(limit, 1.5 * of_whole):
        return None
    return f"{reason}, and from float32 by {error:.1e}, where one call differs by {of_whole:.1e}"


def _difference(found: Tensor, wanted: Tensor) -> float:
    """The greatest difference of logits, relative to the greatest of them."""
    return float((found.float() - wanted).abs().max() / wanted.abs().max())
