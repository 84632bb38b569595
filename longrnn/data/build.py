"""Builds corpora, and keeps those of training runs in a cache.

A corpus is written beside its place and renamed when it is complete. A build that was killed starts
again.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

import numpy as np

from longrnn.checksums import complete_folder
from longrnn.data import stream
from longrnn.data.sources import documents, sources
from longrnn.errors import UserError
from longrnn.files import file_name, naming, write_atomic
from longrnn.locks import locked
from longrnn.progress import Progress
from longrnn.text import Reading, Tokenizer

# Changes whenever the files of a corpus do.
CORPUS_FORMAT = "longrnn-corpus-3"


def corpus_of(
    data: str | Sequence[str],
    tokenizer: Tokenizer,
    part: stream.Part = "all",
    *,
    instruct: bool = False,
) -> stream.Corpus:
    """A part of the corpus that `data` is, or that is made of it in the cache.

    The cache is `$LONGRNN_CACHE`, or `~/.cache/longrnn`. Later runs on the same files, with the
    same tokenizer, find it there.

    Args:
        data: see `longrnn.data.sources`; or one corpus.
        tokenizer: makes the ids.
        part: see `Corpus`.
        instruct: see `Reading`.

    Raises:
        UserError: the data is missing or cannot be read, or the corpus is of another kind.
    """
    listed = [data] if isinstance(data, str) else list(data)
    if not listed:
        raise UserError("data is an empty list: give a file, a folder, a dataset or a corpus")
    folder = Path(os.path.expanduser(listed[0]))
    remedy = stream.CORPUS_REMEDY
    if len(listed) > 1 or not os.path.isfile(folder / stream.HEADER):
        remedy = "remove this folder of the cache, and the next run makes it again"
        reading = Reading(instruct=instruct)
        cache = Path(os.environ.get("LONGRNN_CACHE") or os.path.expanduser("~/.cache/longrnn"))
        name = f"{folder.name}-{_identity(sources(listed), reading, tokenizer)[:16]}"
        folder = cache / "corpora" / file_name(name)
        if not (folder / stream.HEADER).is_file():
            # Runs that start at the same time wait for the first one to build it.
            build(listed, tokenizer, folder, reading=reading, quiet=True, wait=True)
    corpus = stream.Corpus(folder, part, remedy)
    header, has_answers = corpus.header, corpus.scored is not None
    if (header.fingerprint, has_answers) != (tokenizer.fingerprint(), instruct):
        raise UserError(
            f"{folder} was made with the tokenizer {header.tokenizer!r} ({header.fingerprint}) and "
            f"holds {'prompts and answers' if has_answers else 'texts'}: set tokenizer="
            f"{header.tokenizer} and task.kind={'instruct' if has_answers else 'text'}, or build "
            "another with `longrnn data build`"
        )
    return corpus


def build(
    data: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    reading: Reading,
    name: str = "",
    quiet: bool = False,
    wait: bool = False,
) -> stream.Header:
    """Writes the documents of `data`, in their order, as a corpus.

    Args:
        data: see `longrnn.data.sources`.
        tokenizer: makes the ids.
        folder: where; if it holds a corpus of the same data, options and tokenizer, that stays.
        reading: see `Reading`.
        name: by which `load_tokenizer` finds the tokenizer.
        quiet: print no progress.
        wait: wait for a process that writes the folder, which otherwise is an error.

    Raises:
        UserError: a source is missing or cannot be read, there is no document, or `folder` holds
            something else. Nothing is left behind.
    """
    listed = sources(data)
    selects = reading.subset or reading.split != "train"
    if selects and all(isinstance(source, Path) for source in listed):
        raise UserError(
            "files have no splits or subsets: name the files of one, or a dataset on the Hub"
        )
    identity = _identity(listed, reading, tokenizer)
    with locked(folder, instead="choose another --out", wait=wait):
        if (folder / stream.HEADER).is_file() and stream.read_header(folder).identity == identity:
            return stream.read_header(folder)
        header = stream.Header(
            tokenizer=name,
            fingerprint=tokenizer.fingerprint(),
            vocab_size=tokenizer.vocab_size,
            identity=identity,
            dtype="<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
            sources=[*map(str, listed)],
        )
        with complete_folder(folder, "choose another --out", patterns=("*",)) as draft:
            _write(header, listed, tokenizer, draft, reading, quiet)
            write_atomic(draft / stream.HEADER, json.dumps(asdict(header), indent=2) + "\n")
    return header


def _identity(listed: Sequence[Path | str], reading: Reading, tokenizer: Tokenizer) -> str:
    """A hash of what determines a corpus, as far as that can be seen without reading it."""
    # The fingerprint of a tokenizer covers neither its template nor its end-of-sequence token.
    template = getattr(getattr(tokenizer, "tokenizer", None), "chat_template", None)
    used = [reading.model_dump(include=set(Reading.model_fields)), tokenizer.fingerprint()]
    stats = [source.stat() for source in listed if isinstance(source, Path)]
    read_from = [*map(str, listed), *((stat.st_size, stat.st_mtime_ns) for stat in stats)]
    return stream.digest([CORPUS_FORMAT, read_from, *used, tokenizer.eos_id, template])


def _write(
    header: stream.Header,
    listed: Sequence[Path | str],
    tokenizer: Tokenizer,
    folder: Path,
    reading: Reading,
    quiet: bool,
) -> None:
    """Writes the columns of a corpus, and counts in its header."""
    ends, marks, most = [], [], reading.max_tokens or sys.maxsize
    with (
        naming(folder / stream.TOKENS),
        open(folder / stream.TOKENS, "wb") as file,
        Progress("corpus (sources)", len(listed), unit="tokens", quiet=quiet) as progress,
    ):
        for source in takewhile(lambda _: header.tokens < most, listed):
            for ids, scored in documents(source, tokenizer, reading):
                if header.tokens >= most:
                    break
                progress.advance(0, len(ids), Path(source).name)
                if len(ids) < reading.min_length or (reading.instruct and not scored[1:].any()):
                    header.dropped_documents += 1
                    continue
                file.write(ids.astype(header.dtype).data)  # `tofile` hides what went wrong
                header.tokens += len(ids)
                ends.append(header.tokens)
                marks += [scored] if reading.instruct else []
            progress.advance(1, 0)
    header.documents = len(ends)
    if not ends:
        raise UserError(
            f"no document has {reading.min_length} tokens or more"
            f"{' and an answer' if reading.instruct else ''} ({header.dropped_documents:,} were "
            "dropped): give other files or a smaller --min-length"
        )
    write_atomic(folder / stream.DOCUMENTS, np.array(ends, "<u8").data)
    if reading.instruct:
        scored = np.concatenate(marks)
        write_atomic(folder / stream.SCORED, scored.data)
        header.scored_tokens = int(scored.sum())
