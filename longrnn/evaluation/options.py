"""The options of evaluations, for suites and the command line, which reads them without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from longrnn.options import Count, Lengths, Options, Seed, Share, Tokens, listed
from longrnn.units import parse_length


def _places(value: Any) -> Any:
    counts = [str(part).strip() for part in (value.split(",") if isinstance(value, str) else value)]
    return sorted({0 if count == "0" else parse_length(count) for count in counts})


Depths = Annotated[list[Share], BeforeValidator(listed), Field(min_length=1)]
Places = Annotated[list[int], BeforeValidator(_places), Field(min_length=1)]


class PasskeyOptions(Options):
    """Evaluate passkey retrieval over lengths × depths, with keys that training never saw.

    All models get the same keys at the same places, in prompts of exactly the same number of their
    own tokens. Insertion points instead of depths separate the effect of the key's position from
    that of its distance to the question.

    Example: longrnn eval passkey passkey-tiny 'passkey-tiny+forget_more' --lengths 1k,16k
    """

    lengths: Lengths = Field([256, 1024, 4096, 16384])
    """Prompt lengths in tokens."""
    depths: Depths = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0])
    """Where the key is, as shares of the prompt, from 0 (its start) to 1."""
    insert_at: Places | None = None
    """Instead of depths: tokens of filler before the key, such as 0,8k,16k."""
    n: Count = 10
    """Prompts per cell."""
    seed: Seed = 0
    """Random seed of the keys."""
    filler: Path | None = None
    """A text file to hide the keys in (default: The grass is green. …)."""
    n_keys: Annotated[int, Field(ge=1, le=9)] = 1
    """Numbered keys in one prompt; the question is about one of them."""
    chunk_select: Tokens | None = None
    """Split the prompt into chunks of this many tokens, and take the answer with the lowest
    entropy."""
    batch_size: Count = 16
    """Prompts, or chunks of a prompt, in one batch."""


class Texts(Options):
    """Texts to read."""

    texts: list[Path] = Field([])
    """A text file; may be given several times."""
    newlines: bool = False
    """Also measure a text of newlines, the simplest one."""


class PerplexityOptions(Texts):
    """Loss by position on long texts.

    A row of the table has the positions between the length above it and its own. Several models are
    scored on the same bytes, whatever their tokenizers.

    Example: longrnn eval perplexity passkey-tiny --text book.txt --lengths 1k,64k
    """

    lengths: Lengths = Field([1024, 4096, 16384, 65536])
    """Lengths in tokens of the first model. Windows have the last one."""
    windows: Count | None = None
    """At most this many windows of each text, spread evenly."""
    context: Tokens | None = None
    """With --stride: score in overlapping windows of this many tokens, each read from an empty
    state, instead of carrying the state."""
    stride: Tokens | None = None
    """With --context: tokens between the starts of two overlapping windows."""
    batch_size: Count = 8
    """Windows in one batch."""


class SequenceOptions(Options):
    """Evaluate a sequence task on held-out sequences: token accuracy and exact match.

    For reverse_dual_frequency also the accuracy of rare and of frequent tokens, each among rare and
    among frequent tokens. What is not given is as in the training of the first model.

    Example: longrnn eval task runs/sort --lengths 16
    """

    task: str | dict[str, Any] | None = None
    """Name of the task, such as sort, recall or reverse_dual_frequency (default: as in training).
    """
    vocab_size: Count | None = None
    """Vocabulary size of the task (default: as in training)."""
    lengths: Lengths | None = None
    """Lengths of the sequences in tokens (default: as in training)."""
    n: Count = 1024
    """At most this many held-out sequences."""
    batch_size: Count = 64


class MemoryOptions(Options):
    """Measure how much predictions depend on the start of the context (effective remembrance).

    EffRem_T(t) is the total variation distance between the prediction after T tokens and the
    prediction of a model that was not given the first t of them.

    Example: longrnn diagnose memory passkey-tiny --text book.txt --positions 1k,4k,16k
    """

    texts: list[Path]
    """A text file; may be given several times."""
    positions: Lengths = Field([1024, 4096, 16384])
    """T: numbers of tokens after which the prediction is compared."""
    # At most this many stretches of each text, each as long as the longest T.
    stretches: Count = 8
