"""Converts options of lm-eval to those of longrnn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from longrnn.errors import UserError
from longrnn.hf.load import load_plain, mitigated
from longrnn.mitigations import mitigation
from longrnn.models import LanguageModel

BATCH_SIZE = 8
# lm-eval's default for tasks that do not set `max_gen_toks`.
MAX_NEW_TOKENS = 256
# Generation options that are supported, and values of others that have no effect.
OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
NEUTRAL = {
    "top_k": (0, None),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
}


class Generation(NamedTuple):
    """Generation settings of a task.

    Attributes:
        until: stop strings, the text of the tokenizer's EOS included.
        max_new_tokens: maximum number of tokens.
        temperature: 0 for greedy decoding.
        top_p: probability mass of the most likely tokens to sample from.
    """

    until: list[str]
    max_new_tokens: int
    temperature: float
    top_p: float


def parse_generation(options: Mapping[str, Any], eos: str | None) -> Generation:
    """Parse a task's `generation_kwargs`.

    Raises:
        UserError: an option that is not supported.
    """
    found: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS))
    for name, value in found.items():
        unused = name == "top_k" and not found["do_sample"]
        if name not in OPTIONS and value not in NEUTRAL.get(name, ()) and not unused:
            raise UserError(
                f"generation option {name}={value!r} is not supported: leave it out, or use "
                f"{', '.join(sorted(OPTIONS))}"
            )
    return Generation(
        handle_stop_sequences(found["until"], eos=eos),
        found["max_gen_toks"],
        found["temperature"] if found["do_sample"] else 0.0,
        found.get("top_p") or 1.0,
    )


def build_model(
    source: str | Path | LanguageModel,
    spec: str | Sequence[str] | None,
    backend: str,
    dtype: str | None,
    device: str | None,
) -> LanguageModel:
    """Return a loaded model, or load a checkpoint, and apply mitigations."""
    model: Any = source
    if isinstance(source, (str, Path)):
        kind = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not isinstance(kind, torch.dtype):
            raise UserError(f"{dtype!r} is not a supported dtype: use float32, bfloat16 or float16")
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, own = load_plain(source, backend=backend, device=where, dtype=kind)
        specs = [] if own is None else [own]
        return mitigated(model, specs + ([spec] if isinstance(spec, str) else [*(spec or [])]))
    return model if spec is None else model.under(mitigation(spec))


def parse_batch_size(batch_size: int | str | None) -> int:
    """Parse lm-eval's batch size; `auto` gives BATCH_SIZE."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return BATCH_SIZE
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise UserError(
            f"the batch size must be a whole number above 0, not {batch_size!r}: give a number of "
            "rows"
        )
    return int(batch_size)
