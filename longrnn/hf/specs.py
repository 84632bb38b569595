"""Parses `CHECKPOINT+DTYPE+MITIGATION` and applies the mitigation to a loaded model."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from longrnn.errors import UserError
from longrnn.hf.embedded import embedded
from longrnn.mitigations import mitigation
from longrnn.mitigations.spec import parse, split
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.checkpoint import DTYPES
from longrnn.units import parse_length

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=LanguageModel)

# The mitigation that changes nothing.
NONE = "none"
# In place of a mitigation: lifts the maximum length of a Hugging Face model.
BEYOND = "beyond"
# Likewise: limits the attention layers of a hybrid.
WINDOW = "attention_window"
# Likewise: load the weights in this dtype.
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def split_spec(text: str) -> tuple[str, str | None]:
    """Split `CHECKPOINT+MITIGATION` into both; the mitigation is None if there is no plus.

    The name of a folder may contain a plus, and so may the file of a calibrated mitigation: the
    checkpoint is the longest prefix that exists.
    """
    pluses = [index for index, character in enumerate(text) if character == "+"]
    for cut in (len(text), *reversed(pluses)):
        # `Path.exists` fails at names that are too long for a file.
        if text[:cut] in embedded() or os.path.exists(text[:cut]):
            break
    else:
        cut = pluses[0] if pluses else len(text)
    return text[:cut], text[cut + 1 :] if cut < len(text) else None


def split_dtype(spec: str | None) -> tuple[torch.dtype | None, str | None]:
    """Split the dtype of the weights off what follows a checkpoint: `float32+state_norm(…)`.

    Raises:
        UserError: there are several.
    """
    parts = [] if spec is None else split(spec)
    found = [DTYPE_NAMES[part] for part in parts if part in DTYPE_NAMES]
    if not found:
        return None, spec
    if len(found) > 1:
        raise UserError(f"{spec} has {len(found)} dtypes: give one of {', '.join(DTYPE_NAMES)}")
    return found[0], "+".join(part for part in parts if part not in DTYPE_NAMES) or None


def mitigated(model: ModelT, spec: str | Sequence[str] | None) -> ModelT:
    """Return a model under the mitigation that `spec` describes; the given one is not changed.

    Without a `spec` it is the mitigation that the checkpoint of the model records, if there is one.
    A `spec` takes its place, and a warning says so; `none` leaves it out. Two more are valid for
    Hugging Face models: `beyond` lifts the maximum length of any, and `attention_window(window=…)`
    limits the attention layers of a hybrid.

    Raises:
        UserError: an unknown mitigation, or one that is not defined for the model.
    """
    given = [spec] if isinstance(spec, str) else spec or []
    parts = [part for one in given for part in split(one)]
    if isinstance(model, RecurrentLM) and model.trained_under is not None:
        if not parts:
            return _recorded(model)
        if parts != [NONE] and mitigation(parts).describe() != model.trained_under:
            logger.warning(
                f"this model was trained under {model.trained_under} and is used under "
                f"{'+'.join(parts)}: leave that out to use it as it was trained"
            )
    others = [part for part in parts if part != NONE]
    if not isinstance(model, RecurrentLM):
        model, others = _without_own(model, others)
    return model.under(mitigation(others)) if others else model


def _recorded(model: RecurrentLM) -> RecurrentLM:
    """Return a model under the mitigation that its checkpoint records."""
    assert model.trained_under is not None
    try:
        return model.under(mitigation(model.trained_under))
    except UserError as error:
        raise UserError(
            f"{model.loaded_from or 'the model'} was trained under {model.trained_under!r}, which "
            f"cannot be applied ({error}): give CHECKPOINT+{NONE} to use it without"
        ) from error


def _without_own(model: Any, parts: Sequence[str]) -> tuple[Any, list[str]]:
    """Return a Hugging Face model as those parts say that are for it alone, and the other parts."""
    windows = [part for part in parts if part.partition("(")[0].strip() == WINDOW]
    others = [part for part in parts if part != BEYOND and part not in windows]
    named = [*windows, *others]
    if named and not model.cells:
        raise UserError(
            f"{named[0]} changes a recurrence that longrnn computes, and this {model.kind} is "
            f"computed by transformers: leave it out ('{BEYOND}', which lifts the maximum length, "
            "and --chunk-select work for any model)"
        )
    for part in windows:
        _, options = parse(part)
        if options.keys() != {"window"}:
            raise UserError(f"{part} needs one option, window: write {WINDOW}(window=4096)")
        window = parse_length(str(options["window"]))
        model = model.with_attention_window(window)  # pyright: ignore
    return model.beyond() if BEYOND in parts else model, others  # pyright: ignore
