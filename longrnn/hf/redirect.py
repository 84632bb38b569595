"""Gives foreign code that loads a tokenizer by name the tokenizer of a checkpoint of longrnn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longrnn.hf.names import embedded, split_spec
from longrnn.hf.tokenizer import HFTokenizer, byte_level, load_tokenizer


@contextmanager
def own_tokenizers() -> Iterator[None]:
    """Replace `AutoTokenizer.from_pretrained` for callers that allow remote code.

    A name that `load_tokenizer` takes, also one with a mitigation, gives that tokenizer; any other
    is loaded without remote code.
    """
    from transformers import AutoTokenizer

    before = AutoTokenizer.from_pretrained

    def from_pretrained(name: Any, *arguments: Any, **options: Any) -> Any:
        checkpoint = split_spec(str(name))[0]
        is_own = checkpoint in embedded() or os.path.exists(checkpoint)
        if options.get("trust_remote_code") and is_own:
            found = load_tokenizer(checkpoint)
            return (found if isinstance(found, HFTokenizer) else byte_level()).tokenizer
        return before(name, *arguments, **options | {"trust_remote_code": False})

    AutoTokenizer.from_pretrained = from_pretrained  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoTokenizer.from_pretrained = before  # type: ignore[method-assign]
