"""What lm-eval hands over, in our terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from longrnn.errors import UserError
from longrnn.hf.loading import load
from longrnn.hf.specs import mitigated, split_spec
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import LanguageModel

BATCH_SIZE = 8
# What lm-eval takes where a task does not say how much to generate.
MAX_NEW_TOKENS = 256
# Of a task's generation options: what is understood, and what changes nothing at these values.
OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
NEUTRAL = {
    "top_k": (0, None),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
}


class Generating(NamedTuple):
    """How a task wants its answers.

    Attributes:
        until: texts that end one, that of the tokenizer's EOS among them.
        max_new_tokens: at most so many.
        temperature: 0 takes the likeliest token.
        top_p: sample among the likeliest of this mass.
    """

    until: list[str]
    max_new_tokens: int
    temperature: float
    top_p: float


def generating(options: Mapping[str, Any], eos: str | None) -> Generating:
    """A task's `generation_kwargs`.

    Raises:
        UserError: options that would be dropped in silence.
    """
    found: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS))
    for name, value in found.items():
        unused = name == "top_k" and not found["do_sample"]
        if name not in OPTIONS and value not in NEUTRAL.get(name, ()) and not unused:
            raise UserError(
                f"generation option {name}={value!r} is not supported: leave it out, or take "
                f"some of {', '.join(sorted(OPTIONS))}"
            )
    return Generating(
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
    """The model of a checkpoint, or one that is loaded, under a mitigation."""
    model: Any = source
    if isinstance(source, (str, Path)):
        kind = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not isinstance(kind, torch.dtype):
            raise UserError(
                f"{dtype!r} is not a dtype that is supported: use float32, bfloat16 or float16"
            )
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        name, own = split_spec(str(source))
        specs = [] if own is None else [own]
        specs += [spec] if isinstance(spec, str) else spec or []
        model = load(name, backend=backend, device=where, dtype=kind)
        assert not isinstance(model, Mitigated)  # the name has no mitigation left
        return mitigated(model, specs or None)
    return model if spec is None else Mitigated(model, mitigation(spec))


def rows_in_a_batch(batch_size: int | str | None) -> int:
    """The number that lm-eval's option means; `auto` is BATCH_SIZE."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return BATCH_SIZE
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise UserError(
            f"the batch size must be a whole number above 0, not {batch_size!r}: give a number of "
            "rows"
        )
    return int(batch_size)
