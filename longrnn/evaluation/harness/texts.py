"""Documents and scores of the lm-eval tasks in `eval/tasks`.

lm-eval passes the metadata of a task: the metadata of its YAML file, the model's arguments and the
user's `--metadata` together. `Metadata` has the keys that are used here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field
from rapidfuzz.distance import DamerauLevenshtein

from longrnn.data import Passkey
from longrnn.data.prompts import is_recalled, keys
from longrnn.errors import UserError
from longrnn.evaluation.options import evenly_spaced
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.options import Count, Lengths, Options
from longrnn.text import Tokenizer

Document = dict[str, Any]

EXAMPLES = 2  # worked examples in front of a list to reverse


class Metadata(Options):
    """The metadata of our tasks."""

    max_seq_lengths: Lengths = Field(default=[4096], description="Lengths of prompts in tokens.")
    n: Count = Field(default=20, description="Documents of each length.")
    seed: int = Field(default=0, description="Random seed.")
    text: Path | None = Field(default=None, description="A text file, the filler.")
    depths: Count = Field(default=5, description="Number of depths of the passkey.")
    n_items: Lengths = Field(default=[16, 64], description="Lengths of the lists to reverse.")
    vocab_size: Count = Field(default=16384, description="Their items are below this number.")


def read_metadata(metadata: Mapping[str, Any]) -> Metadata:
    """Return the keys that our tasks use.

    Raises:
        UserError: a value that is not valid, or a misspelt name.
    """
    known = Metadata.model_fields
    for name in metadata:
        close = get_close_matches(name, known, n=1, cutoff=0.8)
        if close and name not in known:
            raise UserError(f"unknown metadata {name!r}: did you mean {close[0]!r}?")
    return Metadata(**{name: metadata[name] for name in known if name in metadata})


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that counts tokens: that of the model unless metadata names another."""
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(name, (str, Path)):
        raise UserError(
            "the task needs the tokenizer that counts its tokens: give --metadata tokenizer=NAME"
        )
    return load_tokenizer(name)


def passkey_documents(metadata: Mapping[str, Any]) -> list[Document]:
    """Return prompts of `longrnn.data`, with evenly spaced depths and held-out keys."""
    given, tokenizer = read_metadata(metadata), tokenizer_of(metadata)
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
                text = tokenizer.decode(task.prompt(key, length=room, depth=depth).tolist())
                tokens = len(tokenizer.encode(text))
                room -= max(0, tokens - length)
            documents.append(_document(text, [key], length, length=tokens, depth=depth))
    return documents


def reverse_documents(metadata: Mapping[str, Any]) -> list[Document]:
    """Return lists of numbers from a large vocabulary to reverse, after worked examples."""
    given = read_metadata(metadata)
    documents = []
    for size in given.n_items:
        for index in range(given.n):
            rng = random.Random(f"{given.seed}/{size}/{index}")
            lists = [
                [str(rng.randrange(given.vocab_size)) for _ in range(size)]
                for _ in range(EXAMPLES + 1)
            ]
            examples = [
                f"List: {' '.join(items)}\nBackwards: {' '.join(reversed(items))}\n\n"
                for items in lists[:EXAMPLES]
            ]
            text = f"{''.join(examples)}List: {' '.join(lists[-1])}\nBackwards:"
            documents.append(_document(text, lists[-1][::-1], size))
    return documents


def _document(text: str, outputs: list[str], size: int, **more: Any) -> Document:
    return {"input": text, "outputs": outputs, "max_length": size, **more}


# Each score is returned under its own name and under the length, for a table by length.


def score_key(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return 1 if an answer begins with the key, else 0."""
    right = float(is_recalled(results[0], document["outputs"][0]))
    return {"accuracy": right, str(document["max_length"]): right}


def score_list(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return exact match, accuracy by item, and edit distance (Damerau–Levenshtein, in items)."""
    expected, answer = document["outputs"], re.findall(r"\d+", results[0])
    right = [a == b for a, b in zip(expected, answer, strict=False)]
    exact = float(expected == answer)
    return {
        "exact_match": exact,
        "item_accuracy": sum(right) / len(expected),
        "edit_distance": float(DamerauLevenshtein.distance(answer, expected)),
        str(document["max_length"]): exact,
    }
