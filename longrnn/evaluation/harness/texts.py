"""Documents and scores of the lm-eval tasks in `eval/tasks`.

lm-eval passes the metadata of a task: the metadata of its YAML file, the model's arguments and the
user's `--metadata` together. `OPTIONS` lists the keys that are used here.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rapidfuzz.distance import DamerauLevenshtein

from longrnn.data import Passkey
from longrnn.data.prompts import is_recalled, keys
from longrnn.errors import UserError
from longrnn.evaluation.harness.needles import Haystack, needles, variable_tracking
from longrnn.evaluation.options import evenly_spaced
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.text import Tokenizer, read_text
from longrnn.units import parse_length

Document = dict[str, Any]

# Names and default values.
OPTIONS: dict[str, Any] = {
    "max_seq_lengths": [4096],  # lengths of the prompts in tokens
    "n": 20,  # documents per length
    "seed": 0,
    "text": None,  # a text file: the haystack, or the document
    "depths": 5,  # number of depths of the passkey
    "n_items": [16, 64],  # lengths of the lists to reverse
    "vocab_size": 16384,  # their items are below this number
}
EXAMPLES = 2  # worked examples in front of a list to reverse


def options(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of OPTIONS in metadata.

    Raises:
        UserError: a value of the wrong kind, or a misspelt name.
    """
    for name in metadata:
        close = get_close_matches(name, OPTIONS, n=1, cutoff=0.8)
        if close and name not in OPTIONS:
            raise UserError(f"unknown metadata {name!r}: did you mean {close[0]!r}?")
    found = {name: metadata.get(name, value) for name, value in OPTIONS.items()}
    for name in ("max_seq_lengths", "n_items"):
        values = found[name] if isinstance(found[name], (list, tuple)) else [found[name]]
        found[name] = [parse_length(str(value)) for value in values]
    for name in ("n", "depths", "vocab_size"):
        if not isinstance(found[name], int) or found[name] < 1:
            raise UserError(
                f"metadata {name!r} must be at least 1, not {found[name]!r}: give a positive number"
            )
    return found


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
    given, tokenizer = options(metadata), tokenizer_of(metadata)
    task = Passkey(tokenizer, filler=given["text"] and str(given["text"]))
    documents = []
    for length in given["max_seq_lengths"]:
        if length < (least := task.least_length()):
            raise UserError(
                f"length {length} is too short for a passkey: the least is {least}, give that or "
                "more"
            )
        for index in range(given["n"]):
            depth = evenly_spaced(given["depths"])[index % given["depths"]]
            key = random.Random(f"{given['seed']}/{index}").choice(keys(True))
            text, tokens, room = "", length + 1, length
            while tokens > length:  # a text may have more tokens than it was made of
                text = tokenizer.decode(task.prompt(key, length=room, depth=depth).tolist())
                tokens = len(tokenizer.encode(text))
                room -= max(0, tokens - length)
            documents.append(_document(text, [key], length, tokens))
            documents[-1]["depth"] = depth
    return documents


def needle_documents(kind: str, metadata: Mapping[str, Any]) -> list[Document]:
    """Return texts of one of `needles.KINDS`, or of `variables`."""
    given, tokenizer = options(metadata), tokenizer_of(metadata)
    haystack = Haystack(Path(given["text"]) if given["text"] else None)
    documents = []
    for length in given["max_seq_lengths"]:
        for index in range(given["n"]):
            name = f"{given['seed']}/{index}"
            example = (
                variable_tracking(haystack, tokenizer, length, name)
                if kind == "variables"
                else needles(kind, haystack, tokenizer, length, name)
            )
            tokens = len(tokenizer.encode(f"{example.text} {example.prefix}"))
            documents.append(_document(example.text, example.outputs, length, tokens))
            documents[-1]["gen_prefix"] = example.prefix
    return documents


def reverse_documents(metadata: Mapping[str, Any]) -> list[Document]:
    """Return lists of numbers from a large vocabulary to reverse, after worked examples."""
    given = options(metadata)
    documents = []
    for size in given["n_items"]:
        for index in range(given["n"]):
            rng = random.Random(f"{given['seed']}/{size}/{index}")
            lists = [
                [str(rng.randrange(given["vocab_size"])) for _ in range(size)]
                for _ in range(EXAMPLES + 1)
            ]
            examples = [
                f"List: {' '.join(items)}\nBackwards: {' '.join(reversed(items))}\n\n"
                for items in lists[:EXAMPLES]
            ]
            text = f"{''.join(examples)}List: {' '.join(lists[-1])}\nBackwards:"
            documents.append(_document(text, lists[-1][::-1], size, 0))
    return documents


def text_documents(metadata: Mapping[str, Any]) -> list[Document]:
    """Return the first tokens of a text file at each length; the whole text if there is none."""
    given = options(metadata)
    if not given["text"]:
        raise UserError("longrnn_perplexity needs a text file: give --metadata text=book.txt")
    path = Path(given["text"])
    text, _ = read_text(path)
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode(text)
    if "max_seq_lengths" not in metadata:
        return [{"text": text, "max_length": len(ids)}]
    documents = []
    for length in given["max_seq_lengths"]:
        if length > len(ids):
            raise UserError(
                f"{path} has {len(ids):,} tokens, fewer than {length:,}: give a longer text or a "
                "smaller length"
            )
        # If the cut divides a character, drop its first bytes.
        cut = tokenizer.decode(ids[:length]).rstrip("\ufffd")
        documents.append({"text": cut, "max_length": length})
    return documents


def _document(text: str, outputs: list[str], length: int, tokens: int) -> Document:
    return {"input": text, "outputs": outputs, "max_length": length, "length": tokens}


# Each score is returned under its own name and under the length, for a table by length.


def score_key(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return 1 if an answer begins with the key, else 0."""
    right = float(is_recalled(results[0], document["outputs"][0]))
    return {"accuracy": right, str(document["max_length"]): right}


def score_all(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return the share of the expected strings that an answer contains, as in RULER."""
    answer = results[0].lower()
    recalled = [output.lower() in answer for output in document["outputs"]]
    share = sum(recalled) / len(recalled)
    return {"accuracy": share, str(document["max_length"]): share}


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


def score_text(document: Document, results: Sequence[float]) -> dict[str, Any]:
    """Return the inputs of lm-eval's perplexities, and bits per byte under the length."""
    nats, size = results[0], len(document["text"].encode())
    return {
        "word_perplexity": (nats, len(document["text"].split())),
        "byte_perplexity": (nats, size),
        "bits_per_byte": (nats, size),
        str(document["max_length"]): -nats / math.log(2) / size,
    }
