"""Documents and scores of the lm-eval tasks in `eval/tasks`.

lm-eval passes the metadata of a task: the metadata of its YAML file, the model's arguments and the
user's `--metadata` together. `Metadata` has the keys that are used here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from longrnn.data import Passkey
from longrnn.data.prompts import Needle, is_recalled, keys
from longrnn.errors import UserError
from longrnn.evaluation.options import evenly_spaced
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.options import Count, Lengths, Options

Document = dict[str, Any]


class Metadata(Options):
    """The metadata of our tasks."""

    max_seq_lengths: Lengths = Field(default=[4096], description="Lengths of prompts in tokens.")
    n: Count = Field(default=20, description="Documents of each length.")
    seed: int = Field(default=0, description="Random seed.")
    text: Path | None = Field(default=None, description="A text file, the filler.")
    depths: Count = Field(default=5, description="Number of depths of the passkey.")


def passkey_documents(metadata: Mapping[str, Any]) -> list[Document]:
    """Return prompts of `longrnn.data`, with evenly spaced depths and held-out keys.

    Their tokens are counted by the model's tokenizer, unless the metadata name another.

    Raises:
        UserError: a value in the metadata that is not valid, or a length that is too short.
    """
    known = {name: metadata[name] for name in Metadata.model_fields if name in metadata}
    given = Metadata(**known)
    tokenizer = load_tokenizer(metadata.get("tokenizer") or metadata["pretrained"])
    task, depths = Passkey(tokenizer, filler=given.text and str(given.text)), given.depths
    documents = []
    for length in given.max_seq_lengths:
        if length < (least := task.least_length()):
            raise UserError(
                f"length {length} is too short for a passkey: the least is {least}, give that or "
                "more"
            )
        for index in range(given.n):
            depth = evenly_spaced(depths)[index % depths]
            key = random.Random(f"{given.seed}/{index}").choice(keys(True))
            text, tokens, room = "", length + 1, length
            while tokens > length:  # a text may have more tokens than it was made of
                prompt = task.prompt_of([Needle(key, depth)], 0, length=room)
                text = tokenizer.decode(prompt.tolist())
                tokens = len(tokenizer.encode(text))
                room -= max(0, tokens - length)
            found = {"input": text, "outputs": [key], "max_length": length}
            documents.append({**found, "length": tokens, "depth": depth})
    return documents


def score_key(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return 1 if an answer begins with the key, else 0; also under the length, for a table."""
    right = float(is_recalled(results[0], document["outputs"][0]))
    return {"accuracy": right, str(document["max_length"]): right}
