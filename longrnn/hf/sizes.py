"""Whether the weights in a folder are enough for the Hugging Face model of its `config.json`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.hf.weights import READERS

# Sizes in a Hugging Face configuration that are dimensions of weights.
WIDTHS = ("hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "vocab_size")


def check_sizes(folder: Path) -> None:
    """Refuse a `config.json` that describes a model too large for the weights in the folder.

    transformers would allocate the model before comparing. At least one bit per weight is assumed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = stored_bytes(folder)
    try:
        with quietly():
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config(decoder=True)
        layers = getattr(text, "num_hidden_layers", 1)
        if layers < 1:
            raise ValueError(f"num_hidden_layers is {layers}")
        # A layer takes at least 64 bytes for named weights; a width has at least as many weights.
        fits = layers <= stored // 64 and max(_widths(text.to_dict()), default=0) <= 8 * stored
        if fits:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            fits = sum(weight.numel() for weight in model.parameters()) <= 8 * stored
    except Exception as error:  # transformers raises many kinds of errors for invalid values
        raise UserError(f"{folder} cannot be loaded ({one_line(error)}): copy it again") from error
    if not fits:
        raise UserError(
            f"{folder} cannot be loaded (its config.json describes a model that needs more than "
            f"the {stored:,} bytes of weights in the folder): copy it again"
        )


def _widths(value: Any, is_width: bool = False) -> Iterator[int]:
    """Yield the widths in a configuration, also those that it gives for each layer."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _widths(item, is_width or name in WIDTHS)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _widths(item, is_width)
    elif is_width and isinstance(value, int):
        yield value


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the weight files in a folder."""
    suffixes = {Path(name).suffix for name in READERS}
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in suffixes)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the progress bars and reports of transformers: the caller checks what they report."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
