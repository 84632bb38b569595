"""`longrnn data build`, and training on the corpus that it wrote."""

import re
from pathlib import Path

import pytest

from longrnn.config import dump_config
from longrnn.progress import QUIET
from tests.cli.conftest import CLI, refused
from tests.texts import trained_bpe
from tests.training.runs import metrics, tiny


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Three stories; the last one has a single character."""
    stories = ["Once upon a time. " * 60, "The end.\n\n\nAnd again. " * 50, "x"]
    paths = [tmp_path / f"{index}.txt" for index in range(3)]
    for path, story in zip(paths, stories, strict=True):
        path.write_text(story)
    return paths


def test_build_and_check(cli: CLI, texts: list[Path]) -> None:
    built = cli("data", "build", "--out", "corpus", *texts)
    assert built.code == 0, built.err
    assert built.out.splitlines() == [
        "corpus: 2 documents, 2,180 tokens",
        "dropped: 1 document, too short or without an answer",
    ]
    again = cli("data", "build", "--out", "corpus", *texts)
    assert (again.code, again.err) == (0, "")
    assert again.out == built.out.replace("corpus:", "corpus is built already:")
    checked = cli("info", "corpus")
    assert re.search(r"vocab_size +256\n", checked.out)
    assert re.search(r"tokens +2,180\n", checked.out)
    assert "None" not in checked.out
    assert "1,080 to 1,100, median 1,090" in checked.out
    split = ["--split-on", "\n\n\n", "--min-length", "10"]
    done = cli("data", "build", "--out", "split", *split, texts[1])
    assert done.out.startswith("split: 50 documents, ")
    assert cli("data", "build", "--out", "none", "--subset", "en", texts[1]).code == 2


def test_training_on_a_corpus(
    cli: CLI, texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(QUIET)
    assert cli("data", "build", "--out", "corpus", *texts).code == 0
    config = tiny("streams", Path("run"), task={"kind": "text", "data": "corpus"})
    (tmp_path / "c.yaml").write_text(dump_config(config))
    done = cli("train", "c.yaml")
    assert done.code == 0, done.err
    assert "2 documents with 2,178 tokens" in done.err
    assert "10/10" in done.err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [3, 6, 9, 10]

    train = ["--quiet", "train", "c.yaml", "output_dir=other"]
    assert cli(*train, "--dry-run").err == ""
    bpe = trained_bpe()
    bpe.save(tmp_path / "bpe")
    says = ("made with the tokenizer 'bytes'", "set tokenizer=bytes")
    refused(cli, *train, "tokenizer=bpe", f"model.vocab_size={bpe.vocab_size}", says=says)
