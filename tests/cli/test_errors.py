"""Bad files, folders and configurations: exit code 2, one sentence, nothing written."""

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longrnn.data.build import build
from longrnn.results import read_rows
from longrnn.text import ByteTokenizer, Reading
from tests.cli.conftest import CLI, assert_refused


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Limit the size of files, like a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_while_evaluating(cli: CLI, models: Path, tmp_path: Path) -> None:
    arguments = ["eval", "passkey", models / "text", "--lengths", "160", "--n", "8"]
    arguments += ["--batch-size", "4", "--output", "out"]
    with small_files(1500):
        result = cli(*arguments)
    assert_refused(result, "File too large", "longrnn eval passkey")
    torn = (tmp_path / "out/rows.jsonl").read_bytes()
    assert len(torn) == 1500
    assert cli(*arguments).code == 0
    whole = (tmp_path / "out/rows.jsonl").read_bytes()
    assert whole.startswith(torn[: torn.rindex(b"\n") + 1])
    rows = [row["item"] for row in read_rows(tmp_path / "out/rows.jsonl")[0]]
    assert sorted((row["place"], row["index"]) for row in rows) == [
        (depth, index) for depth in (0, 0.25, 0.5, 0.75, 1) for index in range(8)
    ]


def test_a_disk_without_a_byte_leaves_nothing(cli: CLI, models: Path, tmp_path: Path) -> None:
    """The error names the file that could not be written."""
    with small_files(0):
        result = cli("eval", "passkey", models / "text", "--lengths", "160", "--output", "out")
    assert_refused(result, "File too large", str(tmp_path / ".out.lock"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_training(
    cli: CLI, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No incomplete checkpoint is left, and the command in the error has the launch and options."""
    launch = "launch --cpu --num_processes 2"
    monkeypatch.setenv("LONGRNN_LAUNCH", launch)
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    words = ["--data", "a.txt", "--length", "16", "--no-evaluate", "--output", "run"]
    with small_files(2000):
        result = cli("finetune", models / "text", *words, "max_steps=1")
    assert_refused(result, f"longrnn {launch} finetune --resume run --no-evaluate")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert not list((tmp_path / "run").glob("*.safetensors"))


HOSTILE = "\x1b]0;x\x07\x9b2J\u202e\rerror: none\n"


@pytest.mark.parametrize("place", ["model_type", "tensor", "suite", "folder", "corpus", "text"])
def test_names_of_strangers_do_not_control_the_terminal(
    place: str, cli: CLI, models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / (HOSTILE if place == "folder" else "here")
    commands = {"suite": ["compare", models / "text", "--suite", "here/s.yaml"]}
    commands["text"] = ["eval", "perplexity", models / "text", "--text", HOSTILE]
    folder.mkdir()
    if place == "model_type":
        (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    elif place == "tensor":
        shutil.copy(models / "text/config.json", folder)
        save_file({HOSTILE: torch.ones(1)}, folder / "model.safetensors")
    elif place == "suite":
        spec = {"kind": "passkey", "name": HOSTILE, "lengths": HOSTILE}
        (folder / "s.yaml").write_text(json.dumps({"evaluations": [spec]}))
    elif place == "corpus":
        (tmp_path / "a.txt").write_text("Once upon a time. ")
        built = tmp_path / "built"
        build([str(tmp_path / "a.txt")], ByteTokenizer(), built, reading=Reading(), name=HOSTILE)
        folder = built
    result = cli(*commands.get(place, ["info", folder]))
    assert result.code == (0 if place == "corpus" else 2)
    assert not {*"\x1b\x07\x9b\u202e\r"} & {*result.out, *result.err}
    assert not [line for line in result.err.splitlines()[1:] if line.startswith("error")]
