"""Corpora from files, tables, datasets and conversations."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longrnn.checksums import write_checksums
from longrnn.data import build as building
from longrnn.data.build import build
from longrnn.data.stream import DOCUMENTS, HEADER, SCORED, Corpus
from longrnn.errors import UserError
from longrnn.files import read_json
from longrnn.text import ByteTokenizer, Reading
from tests.cli.test_errors import small_files
from tests.refusals import naming

TEXTS = ["one", "two two", "drei\n\n"]
PAIRS = [("2+2=", "4"), ("3+3=", "6!")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def documents(*data: str | Path, tokenizer: Any = None, **reading: Any) -> list[str]:
    """The documents of a corpus of `data`, as text; tokens of answers in capitals."""
    corpus = Path(f"corpus{len(list(Path().iterdir()))}")
    names = [str(one) for one in data]
    build(names, tokenizer or ByteTokenizer(), corpus, reading=Reading(**reading), quiet=True)
    found = Corpus(corpus)
    texts = []
    for start, stop in found.spans.tolist():
        ids = found.tokens[start:stop]
        scored = np.zeros(len(ids)) if found.scored is None else found.scored[start:stop]
        letters = [chr(i).upper() if one else chr(i) for i, one in zip(ids, scored, strict=True)]
        texts.append("".join(letters))
    return texts


def write(kind: str, rows: list[dict[str, Any]]) -> str:
    """A table in a format."""
    import datasets

    table = datasets.Dataset.from_list(rows)
    getattr(table, {"jsonl": "to_json"}.get(kind, f"to_{kind}"))(f"table.{kind}")
    return f"table.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_row_of_a_table_is_a_document(kind: str) -> None:
    """Every format gives the same documents, without one of a single token; a column has a name."""
    rows = [{"body": text, "number": k} for k, text in enumerate([*TEXTS, "x"])]
    source = write(kind, rows)
    assert documents(source, text_column="body") == TEXTS
    with pytest.raises(UserError, match=naming("text", "body")):
        documents(source)
    with open(f"broken.{kind}", "w") as file:
        file.write('{"text": "a"}\n{"text"')
    with pytest.raises(UserError, match="broken"):
        documents(f"broken.{kind}")
    for most, count in ((3, 1), (4, 2)):
        assert documents(source, text_column="body", max_tokens=most) == TEXTS[:count]
    assert documents(source, text_column="body", min_length=4) == TEXTS[1:]
    # Sources after the last document are not read.
    assert documents(source, f"broken.{kind}", text_column="body", max_tokens=3) == TEXTS[:1]


def test_files_and_folders_of_text() -> None:
    """A file is a document, or several with a separator; folders stand for what is below them."""
    Path("a/b").mkdir(parents=True)
    for name, text in (("a/1.txt", "one<>two"), ("a/b/2.md", "three"), ("a/skipped.pdf", "x")):
        Path(name).write_text(text)
    assert documents("a") == ["one<>two", "three"]
    assert documents("a/b/2.md", "a/1.txt", split_on="<>") == ["three", "one", "two"]
    long = "".join(f" line {k}\n" if k % 7 else f"word {k}\n" for k in range(200_000))
    Path("long.txt").write_text(long)
    assert documents("long.txt") == [long]


class Indents(ByteTokenizer):
    """A tokenizer with one token for the end of a line and the spaces behind it, and large ids."""

    vocab_size = 2**16 + 256

    def encode(self, text: str) -> list[int]:
        return [2**16 + byte for byte in re.sub("\n +", "\x01", text).encode()]


def test_a_file_of_a_folder_is_read_once() -> None:
    """However many links lead to it; a folder with the ending of a text is no text."""
    Path("texts/notes.md").mkdir(parents=True)
    for name in ("a.txt", "notes.md/b.txt"):
        (Path("texts") / name).write_text(name)
    Path("texts/again.txt").symlink_to("a.txt")
    Path("texts/loop").symlink_to(".")
    assert sorted(documents("texts")) == ["a.txt", "notes.md/b.txt"]
    Path("texts/lost.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=naming("lost.txt", "nowhere")):
        documents("texts")


def test_long_texts_have_the_tokens_of_the_whole() -> None:
    """They are tokenized in pieces, which begin with a line that is not indented."""
    text = "a line\n  that goes on\n    and on\nthe next\n" * 50_000
    Path("long.txt").write_text(text)
    assert documents("long.txt", tokenizer=Indents()) == ["".join(map(chr, Indents().encode(text)))]


class Ended(ByteTokenizer):
    """A tokenizer with a token that ends a text."""

    eos_id = ord("$")


def test_prompts_and_answers() -> None:
    source = write("jsonl", [{"prompt": p, "completion": c} for p, c in PAIRS])
    assert documents(source, instruct=True) == ["2+2=4", "3+3=6!"]
    found = Corpus(sorted(Path().glob("corpus*"))[-1])
    assert found.scored is not None
    assert found.scored.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert documents(source, tokenizer=Ended(), instruct=True) == ["2+2=4$", "3+3=6!$"]
    assert documents(source, text_column="prompt", tokenizer=Ended(), append_eos=True)[0] == "2+2=$"


class Chat(ByteTokenizer):
    """A tokenizer with a template: `Q…A…` with the answers of the assistant scored."""

    def encode_chat(self, messages: Any) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        scored: list[bool] = []
        for one in messages:
            is_answer = one["role"] == "assistant"
            own = self.encode(("a" if is_answer else "q") + one["content"])
            ids += own
            scored += [False] + [is_answer] * (len(own) - 1)
        return ids, scored


def test_conversations() -> None:
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "wxyz", strict=True)]
    source = write("jsonl", [{"messages": messages}])
    assert documents(source, tokenizer=Chat(), instruct=True) == ["qwaXqyaZ"]
    with pytest.raises(UserError, match=naming("template", "prompt")):
        documents(source, instruct=True)
    broken = write("jsonl", [{"messages": [{"role": "user"}]}])
    with pytest.raises(UserError, match=naming("row 1", "content")):
        documents(broken, tokenizer=Chat(), instruct=True)


def test_an_interrupted_build_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("some text")
    Path(".corpus.partial").mkdir()
    Path(".corpus.partial/tokens.bin").write_bytes(b"torn")
    build(["a.txt"], ByteTokenizer(), Path("corpus"), reading=Reading(), quiet=True)
    assert Corpus(Path("corpus")).tokens.tolist() == list(b"some text")
    assert sorted(os.listdir("corpus")) == [
        *("checksums.json", "corpus.json", "documents.bin", "tokens.bin")
    ]

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    Path("b.txt").write_bytes(b"x" * 800)
    with small_files(900), pytest.raises(OSError, match="too large") as full:
        build(["a.txt", "b.txt"], ByteTokenizer(), Path("other"), reading=Reading(), quiet=True)
    assert full.value.filename.endswith("tokens.bin")
    assert not Path("other").exists()
    monkeypatch.setattr(building, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        build(["a.txt"], ByteTokenizer(), Path("other"), reading=Reading(), quiet=True)
    assert not Path("other").exists()


DAMAGE: dict[str, dict[str, Any] | list[int]] = {
    "dtype": {"dtype": "object"},  # whose numbers would be addresses in memory
    "size": {"dtype": "<u4"},
    "tokens": {"tokens": 9},
    "documents": {"documents": 3},
    "vocabulary": {"vocab_size": 100},
    "answers": {"scored_tokens": 5},
    "order": [6, 3],
    "beyond": [3, 2**63],
    "short": [3, 5],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_corpus_that_is_not_what_its_header_says_is_refused(name: str) -> None:
    """Although its checksums are those of its files."""
    corpus, change = Path("corpus"), DAMAGE[name]
    Path("a.txt").write_text("one two")
    build(["a.txt"], ByteTokenizer(), corpus, reading=Reading(split_on=" "), quiet=True)
    if isinstance(change, dict):
        header = read_json(corpus / HEADER) | change
        (corpus / HEADER).write_text(json.dumps(header))
        (corpus / SCORED).write_bytes(b"\1" * header["tokens"])
    else:
        (corpus / DOCUMENTS).write_bytes(np.array(change, "<u8").tobytes())
    write_checksums(corpus, ("*",))
    with pytest.raises(UserError, match=naming("corpus")):
        Corpus(corpus)
