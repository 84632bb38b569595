"""Options of the lm-eval model type, and the generation settings of lm-eval's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from pydantic import BeforeValidator, Field

from longrnn.errors import UserError
from longrnn.hf.load import load
from longrnn.hf.names import DTYPE_NAMES
from longrnn.mitigations import mitigation
from longrnn.models import LanguageModel
from longrnn.options import Count, Options, Tokens

BATCH_SIZE = 8
# lm-eval's default for tasks that do not set `max_gen_toks`.
MAX_NEW_TOKENS = 256
# Generation options that are supported, and values of others that have no effect.
SUPPORTED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
NEUTRAL = {
    "top_k": (0, None),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
}


def _batch_size(value: Any) -> Any:
    return BATCH_SIZE if value is None or str(value).startswith("auto") else value


class Arguments(Options):
    """Options of `LongRNN`, which lm-eval calls model arguments."""

    tokenizer: Any = Field(default=None, description="A tokenizer or its name (default: its own).")
    mitigation: str | None = Field(default=None, description="As after a checkpoint's name.")
    backend: str = Field(default="auto", description="Implementation of the recurrence.")
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = Field(
        default=None, description="Of the weights (default: as in the checkpoint)."
    )
    device: str | None = Field(default=None, description="Default: CUDA if it is available.")
    batch_size: Annotated[Count, BeforeValidator(_batch_size)] = Field(
        default=BATCH_SIZE, description="Rows in one batch; auto for the default."
    )
    max_batch_size: Any = Field(default=None, description="lm-eval gives it; it has no effect.")
    max_length: Tokens | None = Field(
        default=None, description="Maximum length in tokens (default: that of the model)."
    )
    prefix_token_id: int | None = Field(
        default=None,
        description="The token in front of a text (default: the tokenizer's BOS, EOS or newline).",
    )
    add_bos_token: bool | None = Field(
        default=None,
        description="Whether texts begin with BOS (default: the setting of the tokenizer).",
    )
    quiet: bool = Field(default=False, description="Show no progress.")


def build_model(source: str | Path | LanguageModel, given: Arguments) -> LanguageModel:
    """Return a loaded model, or load a checkpoint, and apply a mitigation."""
    if not isinstance(source, (str, Path)):
        return source if given.mitigation is None else source.under(mitigation(given.mitigation))
    return load(
        "+".join(filter(None, (str(source), given.mitigation))),
        backend=given.backend,
        device=given.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=None if given.dtype is None else DTYPE_NAMES[given.dtype],
    )


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
        if name not in SUPPORTED and value not in NEUTRAL.get(name, ()) and not unused:
            raise UserError(
                f"generation option {name}={value!r} is not supported: leave it out, or use "
                f"{', '.join(sorted(SUPPORTED))}"
            )
    return Generation(
        handle_stop_sequences(found["until"], eos=eos),
        found["max_gen_toks"],
        found["temperature"] if found["do_sample"] else 0.0,
        found.get("top_p") or 1.0,
    )
