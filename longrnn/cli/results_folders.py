"""Default folders for results: short names from [a-z0-9._-] that a person can type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

# Characters of a name; longer ones are cut.
LONGEST = 72


def results_folder(
    command: str,
    checkpoints: Sequence[str],
    mitigation: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Path:
    """Return the default folder for the results of a command.

    Results are found by the model, whatever the folder is called. So models whose names differ only
    in other characters, or behind the longest name, may share a folder.

    Args:
        command: name of the folder above it.
        checkpoints: names, or `CHECKPOINT+MITIGATION`.
        mitigation: applied to all of them, after their own.
        options: further options that distinguish these results from others, by name.
    """
    from longrnn.hf.names import split_spec

    names = []
    named = [f"{name}-{value}" for name, value in (options or {}).items()]
    for path, own in map(split_spec, checkpoints):
        parts = [Path(path).resolve().name, *filter(None, (own, mitigation)), *named]
        names.append(re.sub(r"[^a-z0-9._]+", "-", "+".join(parts).lower()).strip("-._"))
    return Path("results") / command / ("--".join(names)[:LONGEST].strip("-._") or "models")
