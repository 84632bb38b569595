"""Tasks whose data is tokenized when a run starts, and where the result is kept.

`task.data` of a training configuration names what to train on: a corpus, or files, folders and
datasets. The latter are tokenized once, with the tokenizer of the run, into a corpus in the cache:
`$LONGRNN_CACHE` or else `~/.cache/longrnn`, where later runs on the same data find it. Other data,
another tokenizer or other options make another corpus.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrnn.corpus import HEADER
from longrnn.errors import UserError
from longrnn.files import plain_name
from longrnn.tasks import TASKS, Task
from longrnn.text import Tokenizer
from longrnn.training.documents import Reader, TextReader, build_corpus, identity_of
from longrnn.training.instructions import InstructReader
from longrnn.training.origins import Selection, origins
from longrnn.training.processes import on_main

if TYPE_CHECKING:
    from accelerate import Accelerator

# Options of tasks that say how their data is read, and do not apply to a corpus.
READING = {"split", "subset", "revision", "text_column", "split_on", "append_eos", "max_tokens"}
# Documents of fewer tokens predict nothing.
SHORTEST = 2


def build_task(
    spec: Mapping[str, Any], tokenizer: Tokenizer | None, *, name: str = "", quiet: bool = True
) -> Task:
    """Builds a task, whose data is tokenized first if need be.

    Args:
        spec: `{"kind": …, option: value, …}`.
        tokenizer: of the run.
        name: by which `load_tokenizer` finds the tokenizer.
        quiet: print no progress.

    Raises:
        UserError: an invalid description, or data that cannot be read.
    """
    return TASKS.build(tokenized(spec, tokenizer, name=name, quiet=quiet), tokenizer)


def build_task_together(
    accelerator: Accelerator,
    spec: Mapping[str, Any],
    *,
    tokenizer: Tokenizer | None,
    name: str,
    quiet: bool,
) -> Task:
    """`build_task` in every process of a run; the main one tokenizes first."""
    look = partial(tokenized, spec, tokenizer, name=name, quiet=quiet)
    return TASKS.build(on_main(accelerator, look), tokenizer)


def tokenized(
    spec: Mapping[str, Any], tokenizer: Tokenizer | None, *, name: str = "", quiet: bool = True
) -> dict[str, Any]:
    """The description of a task that reads a corpus in place of other `data`; see `build_task`."""
    given = dict(spec)
    data = given.get("data")
    if data is None or tokenizer is None or not isinstance(given.get("kind"), str):
        return given
    listed = data if isinstance(data, list) else [data]
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise UserError(
            f"data={data!r} does not name data: give a path, the name of a dataset, or a list"
        )
    if len(listed) == 1 and (Path(listed[0]).expanduser() / HEADER).is_file():
        return given | {"data": str(Path(listed[0]).expanduser())}
    checked = TASKS.complete(given)
    kind = given.pop("kind")
    if checked.get("files") or checked.get("corpus"):
        return {"kind": kind, **given}  # which the task refuses
    del given["data"]
    reading = {key: value for key, value in checked.items() if key in READING}
    rest = {key: value for key, value in given.items() if key not in READING}
    packing = {key: checked[key] for key in ("packing",) if key in checked}
    reader = _reader(kind, tokenizer, reading)
    corpus = _corpus(listed, reader, reading, tokenizer, name=name, quiet=quiet)
    return {"kind": kind, **rest, **packing, "corpus": str(corpus)}


def cache_folder() -> Path:
    """Where corpora are kept that were not given a place."""
    given = os.environ.get("LONGRNN_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "longrnn"


def _corpus(
    data: list[str],
    reader: Reader,
    reading: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    name: str,
    quiet: bool,
) -> Path:
    """The corpus of data in the cache, which is built where it is missing."""
    selection = Selection(*(reading[field] for field in Selection._fields))
    max_tokens = reading["max_tokens"]
    sources = origins(data, selection)
    identity = identity_of(sources, tokenizer, reader, SHORTEST, max_tokens)
    title = plain_name(Path(data[0]).name)[:40]
    folder = cache_folder() / "corpora" / f"{title}-{identity[:16]}"
    if not (folder / HEADER).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        build_corpus(
            data,
            tokenizer,
            folder,
            name=name,
            reader=reader,
            selection=selection,
            min_length=SHORTEST,
            max_tokens=max_tokens,
            quiet=quiet,
        )
    return folder


def _reader(kind: str, tokenizer: Tokenizer, reading: Mapping[str, Any]) -> Reader:
    """What makes the documents of a task."""
    append_eos = reading["append_eos"]
    if TASKS[kind].reads_answers:
        return InstructReader(tokenizer, append_eos=append_eos)
    return TextReader(
        tokenizer,
        split_on=reading["split_on"],
        text_column=reading["text_column"],
        append_eos=append_eos,
    )
