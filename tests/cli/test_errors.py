"""Bad files, folders and configurations: exit code 2, one sentence, nothing written."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longrnn.hf import names
from longrnn.results import read_rows
from tests.cli.conftest import CLI, assert_refused, refused
from tests.training.runs import metrics, tiny, write_config

SHORT = ["--lengths", "160", "--depths", "1", "--n", "1", "--quiet"]


@pytest.mark.parametrize("command", [["info"], ["eval", "passkey"], ["eval", "reverse"]])
def test_unknown_checkpoints(
    command: list[str], cli: CLI, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown checkpoint is refused with the nearest name."""
    monkeypatch.setattr(names, "embedded", lambda: {"passkey-tiny": models / "text"})
    refused(cli, *command, "passkey-tyni", says=("passkey-tiny",))
    refused(cli, *command, "no/such/folder", says=("passkey-tiny",))
    refused(cli, *command, models / "text/config.json", says=("folder",))
    sizes = ["--vocab-size", "8", "--lengths", "4"] if "reverse" in command else []
    refused(cli, *command, models, *sizes, says=("config.json",))


def test_a_truncated_checkpoint(cli: CLI, models: Path, tmp_path: Path) -> None:
    """A truncated or missing weights file is refused with its name."""
    shutil.copytree(models / "text", tmp_path / "half")
    with open(tmp_path / "half/model.safetensors", "rb+") as file:
        file.truncate(2000)
    for command in (["info", "half"], ["eval", "passkey", "half", *SHORT]):
        refused(cli, *command, says=("half/model.safetensors", "truncated", "copy"))
    (tmp_path / "half/model.safetensors").unlink()
    refused(cli, "generate", "half", "--prompt", "a", says=("model.safetensors",))


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("max_stps: 3", [], ("max_stps", "max_steps")),
        ("model: {d_modl: 3}", [], ("model", "d_modl", "d_model")),
        ("model: {mixer: {kind: lstn}}", [], ("lstn", "lstm")),
        (
            "model: {mixer: {kind: mamba2, d_stat: 4}}",
            [],
            ("mamba2", "d_state"),
        ),
        ("model: {mixer: {kind: mamba2, d_state: x}}", [], ("d_state",)),
        ("model: {mixer: {kind: mamba2, A_init: {a: 1}}}", [], ("A_init",)),
        ("model: {mixer: lstm}", [], ("model", "key 'model.mixer'", "'lstm'")),
        ("model: {block: plan}", [], ("model.block'", "'plan'", "'plain'")),
        ("model: {position: {kind: sinus}}", [], ("did you mean 'sinusoidal'",)),
        ("task: {kind: revers}", [], ("unknown task 'revers'", "did you mean 'reverse'")),
        ("task: {kind: 3}", [], ("one of: copy, delayed_sum, instruct, passkey",)),
        ("task: {}", [], ("'kind'", "one of: copy, delayed_sum, instruct, passkey")),
        ("seed: 0", ["task={}"], ("'kind'", "one of: copy, delayed_sum, instruct, passkey")),
        ("task: passkey", [], ("key 'task'", "'passkey'")),
        ("max_steps: soon", [], ("key 'max_steps'",)),
        ("max_steps: 0", [], ("key 'max_steps'", "1, not 0")),
        ("just words", [], ("c.yaml", "mapping")),
        ("a: [", [], ("is not YAML",)),
        ('seed: "${a"', [], ("key 'seed'", "integer")),
        ("seed: 0", ["seed=${a"], ("key 'seed'",)),
        ("seed: 0", ["max_steps"], ("'max_steps' is not of the form key=value",)),
        ("seed: 0", ["max_steps=ten"], ("key 'max_steps'",)),
        ("seed: 0", ["model.mixer={kind: lstm"], ("is not YAML",)),
        ("seed: 0", ["model.mixr.kind=lstm"], ("model", "mixr", "did you mean 'mixer'")),
        ("seed: 0", ["length.max=100"], ("at least 156 tokens",)),
        ("seed: 0", ["tokenizer=gpt3"], ("no tokenizer at gpt3",)),
    ],
)
def test_train_configurations(
    text: str, overrides: list[str], says: tuple[str, ...], cli: CLI, tmp_path: Path
) -> None:
    """A bad configuration is refused with the key, and no folder is made."""
    (tmp_path / "c.yaml").write_text(text or "seed: 0")
    refused(cli, "train", "c.yaml", *overrides, "--quiet", says=says)


def test_train_without_a_configuration(cli: CLI, tmp_path: Path) -> None:
    """A missing configuration, or a folder, is refused with its path."""
    refused(cli, "train", "none.yaml", says=("'none.yaml' is neither a file", "reverse_small"))
    refused(cli, "train", tmp_path, says=("cannot be read (it is a folder)", "configs/train"))


def test_train_into_another_run(cli: CLI, tmp_path: Path) -> None:
    """A run does not overwrite another run in the same folder."""
    write_config(tiny("reverse", Path("run"), max_steps=2), tmp_path / "c.yaml")
    assert cli("train", "c.yaml", "--quiet").code == 0
    refused(cli, "train", "c.yaml", "--quiet", says=("--resume run", "output_dir"))


def test_folders_that_cannot_be_written(cli: CLI, models: Path, tmp_path: Path) -> None:
    """An output path at or below a file is refused."""
    (tmp_path / "file").write_text("x")
    says = ("file", "choose another folder")
    passkey = ["eval", "passkey", models / "text", *SHORT]
    refused(cli, *passkey, "--output", "file/below", says=says)
    refused(cli, *passkey, "--output", "file", says=says)
    assert "then:" not in cli(*passkey, "--output", "file").err  # the same command fails again
    reverse = ["eval", "reverse", models / "backwards", "--n", "2", "--quiet"]
    refused(cli, *reverse, "--output", "file/below", says=says)
    write_config(tiny("reverse", Path("file/run")), tmp_path / "c.yaml")
    refused(cli, "train", "c.yaml", "--quiet", says=says)


@pytest.fixture
def small_files() -> Callable[[int], None]:
    """Limits the size of files, like a disk that fills up; 0 removes the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size or soft, hard))

    return limit


def test_a_full_disk_while_evaluating(
    cli: CLI, models: Path, tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    """After a full disk, the evaluation resumes from the last complete row."""
    arguments = ["eval", "passkey", models / "text", "--lengths", "160", "--n", "8", "--quiet"]
    arguments += ["--batch-size", "4", "--output", "out"]
    small_files(1500)
    try:
        result = cli(*arguments)
    finally:
        small_files(0)
    assert_refused(result, "File too large", "longrnn eval passkey")
    torn = (tmp_path / "out/rows.jsonl").read_bytes()
    assert len(torn) == 1500
    assert cli(*arguments).code == 0
    whole = (tmp_path / "out/rows.jsonl").read_bytes()
    assert whole.startswith(torn[: torn.rindex(b"\n") + 1])
    rows = [row["item"] for row in read_rows(tmp_path / "out/rows.jsonl")[0]]
    assert sorted((row["depth"], row["index"]) for row in rows) == [
        (depth, index) for depth in (0, 0.25, 0.5, 0.75, 1) for index in range(8)
    ]


def test_a_full_disk_while_training(
    cli: CLI, tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    """After a full disk no incomplete checkpoint is left, and training resumes."""
    write_config(tiny("reverse", Path("run")), tmp_path / "c.yaml")
    small_files(2000)
    try:
        result = cli("train", "c.yaml", "--quiet")
    finally:
        small_files(0)
    assert_refused(result, "longrnn train --resume run")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert cli("train", "--resume", "run", "--quiet").code == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [3, 6, 9, 10]


def test_an_interrupted_evaluation_says_how_to_go_on(
    cli: CLI, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C prints the command that resumes, and exits with 130."""
    from longrnn.evaluation import passkey

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(passkey, "answers", interrupted)
    result = cli("eval", "passkey", models / "text", *SHORT, "--output", "with space")
    again = f"longrnn eval passkey {models}/text {' '.join(SHORT)} --output 'with space'"
    assert_refused(result, again, code=130)
