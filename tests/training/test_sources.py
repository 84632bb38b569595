"""Files, folders and datasets become a corpus in the cache, once, and a build can be continued."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longrnn import corpus_columns, corpus_writer
from longrnn.corpus import Corpus
from longrnn.errors import UserError
from longrnn.tasks import Instruct, Text
from longrnn.text import ByteTokenizer
from longrnn.training.documents import build_corpus
from longrnn.training.sources import build_task
from tests.hf.test_chat import MARKED, chat_tokenizer
from tests.tasks.test_passkey import trained_bpe
from tests.training.forks import Fork
from tests.training.runs import assert_same_run, last_checkpoint, tiny, write_config

ROWS = [f"document {k}: " + "word " * k for k in range(1, 30)]
PAIRS = [{"prompt": f"{k} + {k} = ", "completion": str(2 * k)} for k in range(30)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGRNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache/corpora"


def texts(corpus: Any) -> list[str]:
    """The documents of a corpus of bytes."""
    sizes = enumerate(corpus.lengths.tolist())
    return [ByteTokenizer().decode(corpus.read(k, 0, n).tolist()) for k, n in sizes]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(kind: str, folder: Path) -> Any:
    """Writes ROWS as one kind of data; returns options of the task."""
    datasets = pytest.importorskip("datasets")
    rows = [{"text": row, "body": row.upper()} for row in ROWS]
    table = datasets.Dataset.from_list(rows)
    folder.mkdir()
    data = folder / "data"
    options: dict[str, Any] = {}
    if kind == "text folder":
        for k, row in enumerate(ROWS):
            path = data / f"{'deep/' if k % 2 else ''}{k:03}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(row)
    elif kind == "text file":
        data.write_text("<|end|>".join(ROWS))
        options["split_on"] = "<|end|>"
    elif kind == "jsonl":
        data = write_jsonl(folder / "data.jsonl", rows)
    elif kind == "column":
        data = write_jsonl(folder / "data.jsonl", [{"body": row} for row in ROWS])
        options["text_column"] = "body"
    elif kind == "folder of jsonl":
        write_jsonl(data / "a/one.jsonl", rows[:10])
        write_jsonl(data / "b/two.jsonl", rows[10:])
        (data / "notes.pdf").write_bytes(b"no text")
    elif kind == "folder of parquet":
        data.mkdir()
        table.to_parquet(str(data / "train-00000-of-00001.parquet"))
        table.select([0]).to_parquet(str(data / "test-00000-of-00001.parquet"))
    elif kind == "saved":
        table.save_to_disk(str(data))
    elif kind == "saved splits":
        splits = {"first": table, "test": table.select([0])}
        datasets.DatasetDict(splits).save_to_disk(str(data))
        options["split"] = "first"
    return {"data": str(data), **options}


KINDS = ["text folder", "text file", "jsonl", "column", "folder of jsonl", "folder of parquet",
         "saved", "saved splits"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data(kind: str, tmp_path: Path, cache: Path) -> None:
    """Each kind of data gives the same documents, tokenized once; changed data is read again."""
    spec = {"kind": "text", **make(kind, tmp_path / "in")}
    task = build_task(spec, ByteTokenizer())
    assert isinstance(task, Text)
    assert sorted(texts(task.documents)) == sorted(ROWS)
    assert task.packing
    (built,) = cache.iterdir()
    before = (built / "tokens.bin").stat().st_mtime_ns
    assert texts(build_task(spec, ByteTokenizer()).documents) == texts(task.documents)  # type: ignore[attr-defined]
    assert (built / "tokens.bin").stat().st_mtime_ns == before
    # A corpus is data too, also from another folder.
    again = build_task({"kind": "text", "data": str(built), "packing": False}, ByteTokenizer())
    assert isinstance(again, Text)
    assert again.data_sha256() == task.data_sha256()
    assert not again.packing

    limited = build_task({**spec, "max_tokens": 60}, ByteTokenizer())
    assert isinstance(limited, Text)
    lengths = limited.documents.lengths
    assert lengths.sum() >= 60 > lengths[:-1].sum()
    assert len(list(cache.iterdir())) == 2
    path = next(p for p in sorted((tmp_path / "in").rglob("*")) if p.is_file())
    if kind in ("text folder", "text file", "jsonl", "column"):
        path.write_text(path.read_text().replace("word", "WORD") + "\n")
        build_task(spec, ByteTokenizer())
        assert len(list(cache.iterdir())) == 3


def test_a_name_on_the_hub_goes_to_load_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is streamed with its split, subset and revision; its errors name a remedy."""
    datasets = pytest.importorskip("datasets")
    asked: list[dict[str, Any]] = []
    local = write_jsonl(tmp_path / "x.jsonl", [{"text": row} for row in ROWS])
    real = datasets.load_dataset

    def load_dataset(path: str, **options: Any) -> Any:
        asked.append({"path": path, **options})
        return real("json", data_files=str(local), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = {"kind": "text", "data": "organisation/name", "split": "validation"}
    task = build_task({**spec, "subset": "en", "revision": "v1"}, ByteTokenizer())
    assert texts(task.documents) == ROWS  # type: ignore[attr-defined]
    wanted = {"path": "organisation/name", "split": "validation", "name": "en", "revision": "v1"}
    assert asked == [{**wanted, "streaming": True}]

    def unreachable(path: str, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach 'organisation/other' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match="organisation/other"):
        build_task({**spec, "data": "organisation/other"}, ByteTokenizer())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": "nowhere"}, ""),
        ({"data": 3}, "data=3"),
        ({"data": []}, ""),
        ({"data": "a.jsonl", "text_column": "no"}, "'no'"),
        ({"data": "a.jsonl", "append_eos": True}, "token"),
        ({"data": "a.jsonl", "corpus": "c"}, ""),
        ({"data": "a.jsonl", "spilt": "train"}, "split"),
        ({"data": "folder", "split": "dev"}, ""),
        ({"data": "saved", "split": "dev"}, "dev"),
        ({"kind": "instruct", "data": "a.jsonl"}, "prompt"),
        ({"kind": "instruct", "data": "chat.jsonl"}, "tokenizer"),
        ({"kind": "instruct", "data": "pairs.jsonl"}, "append_eos=false"),
    ],
)
def test_data_that_cannot_be_used(changes: dict[str, Any], says: str, cache: Path) -> None:
    """What cannot be read is refused in one sentence, and leaves nothing in the cache."""
    datasets = pytest.importorskip("datasets")
    write_jsonl(Path("a.jsonl"), [{"text": "some text"}])
    write_jsonl(Path("folder/b.jsonl"), [{"text": "some text"}])
    write_jsonl(Path("pairs.jsonl"), PAIRS)
    write_jsonl(Path("chat.jsonl"), [{"messages": [{"role": "user", "content": "hi"}]}])
    rows = datasets.Dataset.from_dict({"text": ["some text"]})
    datasets.DatasetDict(train=rows).save_to_disk("saved")
    with pytest.raises(UserError, match=says) as error:
        build_task({"kind": "text", **changes}, ByteTokenizer())
    assert "\n" not in str(error.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_prompts_and_conversations(tmp_path: Path) -> None:
    """Prompt and completion, and messages through the template, give the tokens of answers."""
    tokenizer = chat_tokenizer(MARKED)
    assert tokenizer.eos_id is not None
    chats = [{"messages": [{"role": "user", "content": f"say {k}"},
                           {"role": "assistant", "content": f"yes {k}"}]}
             for k in range(5)]  # fmt: skip
    unanswered = {"messages": [{"role": "user", "content": "hello?"}]}
    write_jsonl(Path("chat.jsonl"), [*chats, unanswered])
    write_jsonl(Path("pairs.jsonl"), [*PAIRS[:5], {"prompt": "nothing", "completion": ""}])
    spec = {"kind": "instruct", "data": ["chat.jsonl", "pairs.jsonl"]}
    task = build_task(spec, tokenizer)
    assert isinstance(task, Instruct)
    corpus = task.documents
    header = corpus.header
    assert (header.documents, header.dropped_documents) == (10, 2)
    answers = []
    for index, length in enumerate(corpus.lengths.tolist()):
        ids, scored = corpus.read(index, 0, length), corpus.read_scored(index, 0, length)
        answers.append(tokenizer.decode(ids[scored].tolist()))
    end = tokenizer.decode([tokenizer.eos_id])
    assert answers == [*(f"yes {k}{end}" for k in range(5)), *(f"{2 * k}{end}" for k in range(5))]
    assert header.scored_tokens == sum(
        int(corpus.read_scored(k, 0, n).sum()) for k, n in enumerate(corpus.lengths.tolist())
    )


def test_a_text_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    """With append_eos, every document ends with that token; empty ones stay empty."""
    tokenizer = chat_tokenizer(MARKED)
    Path("a.txt").write_text("one||two|")
    spec = {"kind": "text", "data": "a.txt", "split_on": "|", "append_eos": True}
    task = build_task(spec, tokenizer)
    assert isinstance(task, Text)
    found = [
        task.documents.read(k, 0, int(n)).tolist() for k, n in enumerate(task.documents.lengths)
    ]
    assert found == [[*tokenizer.encode(word), tokenizer.eos_id] for word in ("one", "two")]


class Stopping(ByteTokenizer):
    """Stops the build at a document."""

    def __init__(self, at: int) -> None:
        self.left = at

    def encode(self, text: str) -> list[int]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().encode(text)


def attempts(out: Path, files: list[Path], **how: Any) -> Iterator[int]:
    """Builds a corpus that is interrupted again and again; yields what each attempt tokenized."""
    while not out.exists():
        tokenizer = Stopping(7)
        try:
            build_corpus(files, tokenizer, out, name="bytes", quiet=True, **how)
        except KeyboardInterrupt:
            yield 7
        else:
            yield 7 - tokenizer.left


@pytest.mark.parametrize("kind", ["text folder", "text file", "jsonl", "saved"])
def test_an_interrupted_build_continues(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that is interrupted tokenizes nothing twice, and ends as an undisturbed one."""
    monkeypatch.setattr(corpus_writer, "RECORD_EVERY", 0.0)
    monkeypatch.setattr(corpus_columns, "SHARD", 256)
    monkeypatch.setattr(corpus_columns, "BLOCK", 64)
    given = make(kind, tmp_path / "in")
    how = {"split_on": given.get("split_on"), "min_length": 40}
    build_corpus([given["data"]], ByteTokenizer(), Path("whole"), name="bytes", quiet=True, **how)
    tokenized = list(attempts(Path("parts"), [given["data"]], **how))
    assert len(tokenized) > 3
    # Attempts may repeat the items since the last document that was long enough to be recorded.
    assert sum(tokenized) < 2 * len(ROWS) + 10
    whole, parts = Corpus(Path("whole")), Corpus(Path("parts"))
    parts.verify()
    assert whole.header == parts.header
    assert whole.header.dropped_documents > 0
    assert texts(parts) == texts(whole)
    assert Path("parts/tokens.1.bin").stat().st_size == 256
    assert not list(Path().glob(".parts*"))


def test_a_build_of_other_data_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded is not used for other files or options."""
    monkeypatch.setattr(corpus_writer, "RECORD_EVERY", 0.0)
    path = write_jsonl(Path("a.jsonl"), [{"text": row} for row in ROWS])
    for change in (lambda: None, lambda: write_jsonl(path, [{"text": row} for row in ROWS[::-1]])):
        with pytest.raises(KeyboardInterrupt):
            build_corpus([path], Stopping(9), Path("out"), name="bytes", quiet=True)
        assert Path(".out.partial/progress.json").exists()
        change()
    build_corpus([path], ByteTokenizer(), Path("out"), name="bytes", quiet=True)
    assert texts(Corpus(Path("out"))) == ROWS[::-1]


def test_a_killed_build_continues(tmp_path: Path) -> None:
    """After SIGKILL, the same command continues and writes the corpus of an undisturbed build."""
    write_jsonl(Path("a.jsonl"), [{"text": row * 40} for row in ROWS * 60])
    Path("bpe").mkdir()
    trained_bpe().save(Path("bpe"))
    build = ["data", "build", "--quiet", "--tokenizer", "bpe", "a.jsonl", "--out"]
    process = Fork(*build, "out", folder=tmp_path / "log")
    partial = Path(".out.partial/tokens.bin")
    assert process.when(lambda: partial.exists() and partial.stat().st_size > 1000)
    process.send(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    for name in ("out", "whole"):
        done = Fork(*build, name, folder=tmp_path / "log")
        assert done.end() == 0, done.err
    assert Corpus(Path("out")).sha256 == Corpus(Path("whole")).sha256
    Corpus(Path("out")).verify()


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_training_on_data_is_resumed_after_a_kill(kind: str, tmp_path: Path) -> None:
    """`longrnn train` tokenizes data, and a killed run resumes bit for bit."""
    rows = [{"text": row} for row in ROWS] if kind == "text" else PAIRS * 4
    write_jsonl(Path("data/a.jsonl"), rows)
    options = {} if kind == "text" else {"append_eos": False}
    how: dict[str, Any] = {"task": {"kind": kind, "data": "data", **options}, "max_steps": 60}
    how |= {"initial_state": {"kind": "carry"}, "length": {"max": 32}, "logging_steps": 1}
    how |= {"save_steps": 3, "segments_per_step": 2}
    for name in ("whole", "killed"):
        write_config(tiny("fitted_noise", tmp_path / name, **how), tmp_path / f"{name}.yaml")
    whole = Fork("train", "whole.yaml", folder=tmp_path / "log")
    assert whole.end() == 0, whole.err
    killed = Fork("train", "killed.yaml", "--quiet", folder=tmp_path / "log2")
    assert killed.when(lambda: (tmp_path / "killed/checkpoint-00000003").is_dir())
    killed.send(signal.SIGKILL)
    killed.end()
    resumed = Fork("train", "killed.yaml", "--resume", folder=tmp_path / "log3")
    assert resumed.end() == 0, resumed.err
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert last_checkpoint(tmp_path / "killed").name == "checkpoint-00000060"
