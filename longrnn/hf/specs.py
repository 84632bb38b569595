"""Parses `CHECKPOINT+DTYPE+MITIGATION` and applies the mitigation to a loaded model."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from longrnn.errors import UserError
from longrnn.hf.embedded import embedded
from longrnn.mitigations import Mitigated, mitigation
from longrnn.mitigations.spec import parse, split
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.checkpoint import DTYPES
from longrnn.units import TokenCount, with_counts

if TYPE_CHECKING:
    from longrnn.hf.adapter import HFLanguageModel

logger = logging.getLogger(__name__)

EditableModelT = TypeVar("EditableModelT", bound=LanguageModel)

# The mitigation under which a model was trained.
TRAINED = "trained"
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


def split_mitigation(text: str) -> tuple[str, str | None]:
    """Split `CHECKPOINT+DTYPE+MITIGATION` into what `load` takes and the mitigation, if any."""
    name, own = split_spec(text)
    dtype, spec = split_dtype(own)
    return (name if dtype is None else f"{name}+{str(dtype).removeprefix('torch.')}"), spec


@overload
def mitigated(
    model: EditableModelT, spec: str | Sequence[str] | None
) -> EditableModelT | Mitigated: ...


@overload
def mitigated(
    model: RecurrentLM | HFLanguageModel, spec: str | Sequence[str] | None
) -> RecurrentLM | Mitigated | HFLanguageModel: ...


def mitigated(model: Any, spec: str | Sequence[str] | None) -> Any:
    """Return the model with the mitigation that `spec` describes; the model itself for None.

    `trained` is the mitigation under which the model was trained; a model that was trained under
    one and is used without it, or with another one, is reported by a warning. Two more are valid
    for Hugging Face models: `beyond` lifts the maximum length of any, and
    `attention_window(window=…)` limits the attention layers of a hybrid.

    Raises:
        UserError: an unknown mitigation, or one that is not defined for the model.
    """
    if isinstance(model, RecurrentLM):
        return _mitigated(model, spec)
    if spec is None:
        return model
    parts = [part for one in ([spec] if isinstance(spec, str) else spec) for part in split(one)]
    windows = [part for part in parts if part.partition("(")[0].strip() == WINDOW]
    others = [part for part in parts if part != BEYOND and part not in windows]
    editable = bool(isinstance(model, LanguageModel))
    if (windows or others) and not editable:
        raise UserError(
            f"{[*windows, *others][0]} changes a recurrence that longrnn computes, and this "
            f"{model.kind} is computed by transformers: leave it out ('{BEYOND}', which lifts the "
            "maximum length, and --chunk-select work for any model)"
        )
    for part in windows:
        _, options = parse(part)
        if options.keys() != {"window"}:
            raise UserError(f"{part} needs one option, window: write {WINDOW}(window=4096)")
        window = with_counts(options, {"window": TokenCount}, f"{WINDOW}, option")["window"]
        model.window_attention(window)
    if BEYOND in parts:
        model.go_beyond()
    return Mitigated(model, mitigation(others)) if others else model


def _mitigated(model: RecurrentLM, spec: str | Sequence[str] | None) -> RecurrentLM | Mitigated:
    """`mitigated` of a recurrent model."""
    under = model.trained_under
    if spec == TRAINED or (spec is not None and list(spec) == [TRAINED]):
        if under is None:
            raise UserError(
                f"the model was trained without a mitigation: leave {TRAINED} out, or name one"
            )
        return Mitigated(model, mitigation(under))
    found = None if spec is None else Mitigated(model, mitigation(spec))
    same = found is not None and under == found.mitigation.describe()
    if under is not None and not same:
        logger.warning(
            f"this model was trained under {under} and is used "
            f"{'without it' if found is None else f'under {found.mitigation}'}: give the "
            f"checkpoint as CHECKPOINT+{TRAINED} to use it as it was trained"
        )
    return found or model
