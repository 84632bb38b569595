"""Configurations: YAML and dotted overrides onto dataclasses, nothing unknown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from longrnn.config import build_config, dump_config, load_config
from longrnn.errors import UserError, nearest
from longrnn.training.config import TrainConfig

CONFIGS = sorted((Path(__file__).parents[1] / "configs/train").glob("*.yaml"))


@dataclass
class Inner:
    width: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass
class Outer:
    rate: float = 0.1
    steps: int = 5
    label: str | None = None
    inner: Inner = field(default_factory=Inner)
    free: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_values_and_overrides(tmp_path: Path) -> None:
    """Overrides that lose to the file, or defaults that are forgotten."""
    path = write(tmp_path, "rate: 1e-3\ninner: {width: 7}\nfree: {kind: x, deep: {a: 1}}\n")
    config = load_config(Outer, path, ["inner.width=9", "free.deep.b=[1, 2]", "label=it = this"])
    assert config == Outer(
        rate=1e-3,
        label="it = this",
        inner=Inner(width=9),
        free={"kind": "x", "deep": {"a": 1, "b": [1, 2]}},
    )
    assert type(config.inner) is Inner
    assert type(config.free["deep"]) is dict


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n"])
def test_an_empty_file_is_refused(text: str, tmp_path: Path) -> None:
    """A run of nothing but defaults is never what a file that was cut off meant."""
    with pytest.raises(UserError, match=r"config.yaml is empty: write at least one key"):
        load_config(Outer, write(tmp_path, text))
    with pytest.raises(UserError, match="is empty"):
        load_config(Outer, write(tmp_path, text), ["steps=3"])


@pytest.mark.parametrize("how", ["file", "override"])
def test_an_empty_mapping_is_no_default(tmp_path: Path, how: str) -> None:
    """`task: {}` that trains on the default task without a word."""
    text, overrides = ("task: {}", []) if how == "file" else ("task: {kind: reverse}", ["task={}"])
    assert load_config(TrainConfig, write(tmp_path, text), overrides).task == {}
    nested = load_config(TrainConfig, write(tmp_path, "model: {mixer: {}}"), ["seed=1"])
    assert nested.model.mixer == {}
    assert nested.task == {"kind": "passkey"}
    added = load_config(TrainConfig, write(tmp_path, "seed: 1"), ["task.max_segments=3"])
    assert added.task == {"kind": "passkey", "max_segments": 3}


def test_dump_reads_back_equal(tmp_path: Path) -> None:
    """A number or None that changes its type on the way through the file."""
    config = Outer(rate=1e-9, steps=10**6, label="1e-9", inner=Inner(names=["yes", "null"]))
    config.free = {"a": None, "b": 2.0, "c": "2.0", "d": [1e-3, 16.0]}
    assert load_config(Outer, write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_of_the_repository(path: Path, tmp_path: Path) -> None:
    """A file in configs/ that no longer loads."""
    config = load_config(TrainConfig, path)
    assert load_config(TrainConfig, write(tmp_path, dump_config(config))) == config
    assert asdict(config)["task"]["kind"]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("rat: 1", [], "unknown key rat: did you mean 'rate'"),
        ("inner: {widht: 1}", [], "unknown key inner.widht: did you mean 'width'"),
        ("", ["inner.nmaes=x"], "unknown key inner.nmaes: did you mean 'names'"),
        ("", ["zzz=1"], "unknown key zzz: known: free, inner, label, rate, steps"),
        ("1: 2", [], "unknown key 1: known:"),
        ("steps: many", [], "key 'steps'"),
        ("steps: 1.5", [], "key 'steps'"),
        ("inner: {width: [1]}", [], "key 'inner.width'"),
        ("inner: 3", [], "key 'inner'"),
        ("free: [1]", [], "key 'free'"),
        ("rate: null", [], "key 'rate'"),
        ("", ["steps=ten"], "key 'steps'"),
        ("", ["inner=3"], "key 'inner'"),
        ("", ["steps"], "override 'steps' is not of the form key=value"),
        ("", ["=3"], "override '=3' is not of the form key=value"),
        ("", ["free={a: 1"], "an override is not YAML"),
        ("", ["steps.a=1"], "key 'steps'"),
        ("label: ${nowhere}", [], "nowhere"),
        ("- a\n- b", [], "must be a mapping"),
        ("3", [], "cannot be read as a mapping"),
        ("just words", [], "unknown key just words"),
        ("a: [1", [], "is not YAML"),
        ("a: b: c", [], "is not YAML"),
        ("a: \x00", [], "is not YAML"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    """A stray key taken in silence, or an error of a library instead of one sentence."""
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_config(Outer, path, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    """A traceback for a wrong path."""
    with pytest.raises(UserError, match="no configuration file .*configs/train"):
        load_config(Outer, tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"cannot be read .*configs/train"):
        load_config(Outer, tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="is not YAML"):
        load_config(Outer, tmp_path / "bytes.yaml")


def test_a_mapping_is_required() -> None:
    """A checkpoint without its configuration."""
    with pytest.raises(UserError, match="somewhere must be a mapping"):
        build_config(Outer, None, source="somewhere")


def test_the_nearest_name() -> None:
    """Help that names nothing where nothing is near."""
    assert nearest("mamba", ["lstm", "mamba2"]) == "did you mean 'mamba2'?"
    assert nearest("zzz", ["lstm", "gru"]) == "known: gru, lstm"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps=0", "max_steps must be at least 1"),
        ("save_steps=-1", "save_steps must be at least 1"),
        ("learning_rate=0", "must be above 0"),
        ("length.sampling=log_unifrm", "did you mean 'log_uniform'"),
        ("length.min=300", "must be between 1 and length.max"),
        ("mixed_precision=int8", "use no, bf16 or fp16"),
    ],
)
def test_training_values_out_of_range(override: str, message: str) -> None:
    """A value that would fail hours later, or never."""
    with pytest.raises(UserError, match=message):
        build_config(TrainConfig, {}, [override])
