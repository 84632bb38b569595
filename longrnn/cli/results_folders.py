"""Default folders for results: short names from [a-z0-9._-] that a person can type.

A name lists checkpoints and mitigations, separated by `--`, and a checkpoint once for all of its
mitigations; `plain` stands for none where there are also some:

    passkey-tiny                                     results of one checkpoint
    passkey-tiny--sliding_window-64                  under a mitigation
    a--plain--sliding_window-64--forget_more-0.98    a, and a under two mitigations
    a--b--suite-quick                                a and b, on a suite

Where a name cannot tell all that was given (several mitigations in a chain, a file in another
folder, capital letters, two folders of one name, too many models), eight hexadecimal digits of its
SHA-256 follow. So different lists have different names, except for checkpoints in different
folders that have the same last name; evaluations that continue earlier results refuse those of
another model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from longrnn.files import RESERVED

BETWEEN = "--"
PLAIN = "plain"
# Characters of a name; longer ones are cut and get a hash.
LONGEST = 72
# A name that stands for itself: no capital letters and no separator.
EXACT = re.compile(r"[a-z0-9_][a-z0-9._]*(?:-[a-z0-9._]+)*")
DIGEST = re.compile(r"[0-9a-f]{8}")
# Options that occur in names.
OPTIONS = ("chunk_select", "init", "overlap", "suite")


class Item(NamedTuple):
    """A part of a name; `exact` where nothing else that could be given has the same text."""

    text: str
    exact: bool


def results_folder(
    evaluation: str,
    checkpoints: Sequence[str],
    mitigation: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Path:
    """Return the default folder for results, one for each list of models.

    Args:
        evaluation: name of the folder above it.
        checkpoints: names, or `CHECKPOINT+MITIGATION`.
        mitigation: applied to all of them, after their own.
        options: further options that distinguish these results from others, by name.
    """
    return Path("results") / evaluation / models_name(checkpoints, mitigation, options)


def models_name(
    checkpoints: Sequence[str],
    mitigation: str | None = None,
    options: Mapping[str, str] | None = None,
) -> str:
    """Return the name of a folder or file for these models; see `results_folder`."""
    from longrnn.hf.names import split_spec

    split = [split_spec(checkpoint) for checkpoint in checkpoints]
    models = [
        (Path(path).resolve(), "+".join(filter(None, (own, mitigation)))) for path, own in split
    ]
    folders = {path for path, _ in models}
    names = {path: path.name or "root" for path in folders}
    distinct = len(set(names.values())) == len(folders)
    items: list[Item] = []
    for path, group in groupby(models, key=lambda model: model[0]):
        items.append(_checkpoint(names[path], first=not items))
        specs = [spec for _, spec in group]
        if specs != [""]:
            items += [_mitigation(spec) if spec else Item(PLAIN, True) for spec in specs]
    items += [_option(name, value) for name, value in (options or {}).items()]
    text = BETWEEN.join(item.text for item in items)
    if distinct and all(item.exact for item in items) and len(text) <= LONGEST:
        return text
    given = [
        [(names[path] if distinct else str(path), spec) for path, spec in models],
        sorted((options or {}).items()),
    ]
    digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:8]
    return f"{text[:LONGEST].rstrip('-._')}{BETWEEN}{digest}"


def _checkpoint(name: str, *, first: bool) -> Item:
    # The first part of a name is always a checkpoint; later ones may look like something else.
    other = name.partition("-")[0] in (PLAIN, *OPTIONS) or DIGEST.fullmatch(name)
    taken = not first and (other or _is_mitigation(name))
    exact = EXACT.fullmatch(name) is not None and not RESERVED.fullmatch(name) and not taken
    return Item(_plain(name), exact)


def _option(name: str, value: str) -> Item:
    assert name in OPTIONS
    plain = _plain(f"{name}-{value}")
    return Item(plain, re.fullmatch(r"[a-z0-9_.]+", value) is not None)


def _is_mitigation(name: str) -> bool:
    """Whether the text of a mitigation may be this."""
    from longrnn.hf.names import BEYOND, DTYPE_NAMES
    from longrnn.mitigations import MITIGATIONS

    kinds = (BEYOND, *DTYPE_NAMES, *MITIGATIONS)
    return name.partition("-")[0] in kinds or name.endswith((".yaml", ".yml"))


def _mitigation(spec: str) -> Item:
    """A mitigation with the values of its options, in the order in which they are declared."""
    from longrnn.mitigations import MITIGATIONS
    from longrnn.mitigations.base import Mitigation

    found = re.fullmatch(r"(\w+)(?:\((.*)\))?", spec)
    if found is None or found[1] not in MITIGATIONS:
        exact = EXACT.fullmatch(spec) is not None and _is_mitigation(spec)
        # Of a file in another folder, the name of the file is enough to recognise it.
        return Item(_plain(" ".join(part.rpartition("/")[2] for part in spec.split("+"))), exact)
    pairs = [pair.partition("=")[::2] for pair in (found[2] or "").split(",") if pair.strip()]
    given = {name.strip(): value.strip() for name, value in pairs}
    common = {field.name for field in fields(Mitigation)}
    options = [f.name for f in fields(MITIGATIONS[found[1]]) if f.name not in common]
    declared = options[: len(given)]
    exact = set(declared) == set(given) and all(
        re.fullmatch(r"[0-9.]+", value) for value in given.values()
    )
    values = [given[name] for name in declared] if exact else list(given.values())
    return Item(_plain("-".join([found[1], *values])), exact)


def _plain(text: str) -> str:
    """The text in characters that need no quotes; itself where it has no others."""
    if EXACT.fullmatch(text):
        return text
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._") or "results"
