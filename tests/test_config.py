"""Configurations: YAML, dotted overrides, and one sentence for what does not fit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longrnn.cells import MIXERS
from longrnn.config import dump_config, load_config, overridden
from longrnn.errors import UserError
from longrnn.options import Options, validated
from longrnn.training.config import configured
from longrnn.yaml import parse_yaml, read_mapping, yaml_text
from tests.refusals import naming

CONFIGS = sorted((Path(__file__).parents[1] / "configs/train").glob("*.yaml"))
# Values for what a configuration leaves to the user.
OPEN = {"finetune": ["init_from=base", "task.data=docs"], "linearize": ["task.data=docs"]}


class Inner(Options):
    width: int = 3
    names: list[str] = ["a"]


class Outer(Options):
    rate: float = 0.1
    steps: int = 5
    label: str | None = None
    inner: Inner = Inner()
    free: dict[str, Any] = {}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Outer:
    return validated(Outer, overridden(load_config(path), overrides), "it")


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_values_and_overrides(tmp_path: Path) -> None:
    """Overrides win over the file, and the file over the defaults; a dump reads back equal."""
    path = write(tmp_path, "rate: 1e-3\ninner: {width: 7}\nfree: {kind: x, deep: {a: 1}}\n")
    config = load(path, ["inner.width=9", "free.deep.b=[1, 2]", "label=it = this"])
    assert config == Outer(
        rate=1e-3,
        label="it = this",
        inner=Inner(width=9),
        free={"kind": "x", "deep": {"a": 1, "b": [1, 2]}},
    )
    assert load(path, ["free=null", "free.a=1"]).free == {"a": 1}
    config.free = {"a": None, "b": 2.0, "c": "2.0", "d": [1e-3, 16.0]}
    assert load(write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_of_the_repository(path: Path, tmp_path: Path) -> None:
    """Every bundled file is valid, also by its name, and its dump reads back equal."""
    config = configured(path, OPEN.get(path.stem, []))
    assert configured(path.stem, OPEN.get(path.stem, [])) == config
    assert configured(write(tmp_path, dump_config(config))) == config


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reverse_small").write_text("output_dir: mine")
    assert configured("reverse_small").output_dir == "mine"
    with pytest.raises(UserError, match=naming("reverse_small")):
        configured("reverse_smal")
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00\x80")
    for path in ("none.yaml", tmp_path, "bytes.yaml"):
        with pytest.raises(UserError, match=naming(Path(path).name)):
            load(path)
    with pytest.raises(UserError, match="somewhere"):
        validated(Outer, None, "somewhere")


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder named `~` appears beside a configuration."""
    monkeypatch.setenv("HOME", "/home/me")
    text = "output_dir: ~/runs/x\ntask: {kind: text, data: [~/a.txt, b~/c.txt]}\n"
    config = configured(write(tmp_path, text), ["init_from=~/base"])
    assert (config.output_dir, config.init_from) == ("/home/me/runs/x", "/home/me/base")
    assert config.task["data"] == ["/home/me/a.txt", "b~/c.txt"]


def test_words() -> None:
    """`no`, which YAML reads as false, is a word; a boolean is not a value of a kind."""
    config = configured("reverse_small", ["mixed_precision=no", "gradient_checkpointing=true"])
    assert (config.mixed_precision, config.gradient_checkpointing) == ("no", "block")
    with pytest.raises(UserError, match="option 'init"):
        MIXERS.complete({"kind": "mamba2", "init": False})


@pytest.mark.parametrize(
    "value", ["12e4567890123456", "1e5", "true", "3", 1e-05, 12.0, None, [[1]] * 2]
)
def test_what_is_written_as_yaml_is_read_again(value: object) -> None:
    """A fingerprint that looks like a number stays a text."""
    assert parse_yaml(yaml_text({"fingerprint": value})) == {"fingerprint": value}
    assert parse_yaml("1e3-run") == "1e3-run"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [x, x]\nb: [*a, *a]", r"the alias \*a"),
        ("a: &a {x: 1}\nb: {<<: *a}", r"the alias \*a"),
        ("seed: 1\nseed: 2", "'seed' occurs twice"),
        ("a: 2024-99-99", "month"),
        ("a: !!bool x", "'x'"),
        ("[" * 5000, "recursion"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    """The file and the reason are named."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=f"a.yaml.*{reason}"):
        read_mapping(tmp_path / "a.yaml", "write it again")
